// What the page holds: an index of all models, and for each model its arrays, unpacked when it is first looked at.

// A model's arrays: {alpha, D, figures: Map name -> Float32Array | null, spectra: [ {x, y} | null ] | null}.
const unpackedModels = new Map();

function model(number) {
  if (!unpackedModels.has(number)) unpackedModels.set(number, unpack(number));
  return unpackedModels.get(number);
}

async function unpack(number) {
  const about = index.models[number];
  const [alpha, D, figures, spectra] = blob(`model-${number}`).split(" ");
  const layers = index.layouts[about.layout].names.length;
  const none = () => new Float32Array(layers).fill(NaN); // left out for the size of the page
  const found = { alpha: alpha ? await floats(alpha) : none(), D: D ? await floats(D) : none(), figures: null, spectra: null };
  if (figures) {
    const all = await floats(figures);
    found.figures = new Map(about.figures.map((name, at) => [index.figures[name], all.subarray(at * layers, (at + 1) * layers)]));
  }
  if (spectra) found.spectra = unpackSpectra(await inflate(spectra), layers);
  return found;
}

// The reverse of packing.packed_spectra: for each layer {x, y, bins: shares of 64 equal bins of x} or null.
const BINS = 64;

function unpackSpectra(bytes, layers) {
  const head = new Float32Array(interleaved(bytes.subarray(0, layers * 24), 4));
  const bars = bytes.subarray(layers * 24, layers * (24 + BINS));
  const rest = bytes.subarray(layers * (24 + BINS));
  const axes = [0, 1].map((axis) => new Uint16Array(interleaved(rest.subarray(axis * rest.length / 2, (axis + 1) * rest.length / 2), 2)));
  const out = [];
  let from = 0;
  for (let layer = 0; layer < layers; layer++) {
    const [count, ...ends] = head.subarray(layer * 6, layer * 6 + 6);
    if (!count) { out.push(null); continue; }
    const [x, y] = axes.map((steps, axis) => {
      const [low, high] = ends.slice(2 * axis, 2 * axis + 2);
      let sum = 0;
      return Float64Array.from(steps.subarray(from, from + count), (step) => {
        sum = (sum + step) & 65535;
        return low + (high - low) * sum / 65535;
      });
    });
    const counts = Array.from(bars.subarray(layer * BINS, (layer + 1) * BINS), (each) => Math.expm1(each / 255 * Math.log1p(ends[4])));
    const all = counts.reduce((a, b) => a + b, 0) || 1;
    out.push({ x, y, bins: counts.map((each) => each / all) });
    from += count;
  }
  return out;
}

function reasonOf(about, layer) {
  about.why ??= new Map(about.bad);
  return about.why.has(layer) ? index.reasons[about.why.get(layer)] : null;
}
