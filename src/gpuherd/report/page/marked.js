// Strangers' text on the screen: as text nodes only, with the signs that can't be seen, or that turn a line round, written
// out.

// Control characters but for tab and line feed, soft hyphens, marks of direction, joiners of no width, separators, fillers
// that are blank, tags and the variation selectors that no writing uses (texts are hidden in both), private use, halves of
// pairs.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u2800\u3164\ufeff\uffa0\ufff9-\ufffb\ufffe\uffff\u{1d173}-\u{1d17a}\u{e0000}-\u{e0fff}\p{Co}\p{Cs}]/gu;

function marked(text) {
  const nodes = [];
  let from = 0;
  for (const found of text.matchAll(UNSEEN)) {
    if (found.index > from) nodes.push(text.slice(from, found.index));
    const code = found[0].codePointAt(0).toString(16);
    const word = code.length > 4 ? `\\u{${code}}` : `\\u${code.padStart(4, "0")}`;
    nodes.push(make("span", { class: "sign", title: "a sign that can't be seen" }, word));
    from = found.index + found[0].length;
  }
  if (from < text.length) nodes.push(text.slice(from));
  return nodes;
}

// Words of which nothing can turn a line round, where no element can be made of them.
const plain = (text) => text.replace(UNSEEN, (sign) => `\\u${sign.codePointAt(0).toString(16).padStart(4, "0")}`);
