// What the page holds: an index, scores and verdicts, and the answers themselves in chunks, which are
// unpacked when they are first looked at.

const VERDICTS = ["correct", "incorrect", "not_attempted", "unparsed", "nan"];
const VERDICT_WORDS = ["correct", "incorrect", "not attempted", "unparsed", "NaN", "not judged"];
const UNJUDGED = 5;

let index = null; // what contents.py made
let scores = null; // one Float32Array a measure, NaN where it is not defined
let verdicts = null; // one Uint8Array a judge: places in VERDICTS, or UNJUDGED

const blob = (name) => document.getElementById(name).textContent;
const parsed = async (text) => JSON.parse(new TextDecoder().decode(await inflate(text)));

async function readIndex() {
  index = await parsed(blob("index"));
  const all = await floats(blob("scores"));
  scores = index.measures.map((_, at) => all.subarray(at * index.scored, (at + 1) * index.scored));
  const codes = await inflate(blob("verdicts"));
  verdicts = index.judges.map((_, at) => codes.subarray(at * index.scored, (at + 1) * index.scored));
}

const answers = []; // by number; those of chunks that are not unpacked yet are missing
let unpacking = null;

// All answers that the page holds; told(share) while they are being unpacked.
function allAnswers(told) {
  unpacking ??= (async () => {
    for (let chunk = 0; chunk * index.chunk < index.shown; chunk++) {
      const found = await parsed(blob(`chunk-${chunk}`));
      found.forEach((each, at) => { each.number = chunk * index.chunk + at; answers.push(each); });
      told?.(answers.length / index.shown);
    }
    return answers;
  })();
  return unpacking;
}

// A text may have been cut: then it is [beginning, characters left out].
const beginning = (text) => Array.isArray(text) ? text[0] : text;
const leftOut = (text) => Array.isArray(text) ? text[1] : 0;
const verdictOf = (number, judge = state.judge) => verdicts.length ? verdicts[judge][number] : UNJUDGED;
