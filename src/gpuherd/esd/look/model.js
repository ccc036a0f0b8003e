// The view of one model: heat map, the chosen layer's spectrum and figures, histogram, depth, and all layers.

// alpha of a model minus that of another, for each of its matrices; NaN where the other has no such layer.
function difference(about, own, otherAbout, other) {
  const place = new Map(index.layouts[otherAbout.layout].keys.map((key, at) => [key, at]));
  return Float32Array.from(index.layouts[about.layout].keys, (key, at) => place.has(key) ? own.alpha[at] - other.alpha[place.get(key)] : NaN);
}

function quantile(values, share) {
  const sorted = [...values].filter(present).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : null;
}

function median(values) {
  const sorted = values.filter(present).sort((a, b) => a - b);
  return sorted.length ? (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2 : null;
}

let meaningsOpen = false;

async function modelView(number, layer, against) {
  const about = index.models[number];
  const layout = index.layouts[about.layout];
  const own = await model(number);
  const panel = make("div");
  const heat = make("section", { class: "card" });
  let current = layer ?? firstFitted();
  let map = null;

  function firstFitted() {
    const found = own.alpha.findIndex(present);
    return found < 0 ? 0 : found;
  }

  function choose(next, scroll = false) {
    current = next;
    history.replaceState(null, "", `#/model/${number}${against === null ? `/${next}` : `/vs/${against}/${next}`}`);
    map?.choose(next);
    drawLayer();
    drawWaiting();
    rows.fill();
    if (scroll) panel.scrollIntoView({ block: "nearest" });
  }

  async function drawHeat() {
    const other = against === null ? null : await model(against);
    const values = other ? difference(about, own, index.models[against], other) : own.alpha;
    const place = (i) => index.layouts[index.models[against].layout].keys.indexOf(layout.keys[i]);
    const most = other ? Math.max(1e-3, quantile([...values].map(Math.abs), 0.98) ?? 1) : null;
    const stops = other ? [-most, -most / 2, 0, most / 2, most] : ALPHA_STOPS;
    map = heatmap({ layout, values, stops, chosen: current, label: other ? "Δalpha by layer and module" : "alpha by layer and module",
      tell: (value) => other ? value.toFixed(2).replace("-0.00", "0.00") : value.toFixed(1), onChoose: (i) => choose(i, true), more: (i) => other ? `, from ${figure(other.alpha[place(i)])} to ${figure(own.alpha[i])}` : `, D ${figure(own.D[i])}`,
      missing: (i) => reasonOf(about, i) ?? (other ? "not in the other model" : "no value") });
    const middle = other ? median([...values].map(Math.abs)) : null;
    heat.replaceChildren(
      make("div", { class: "bar" }, make("h3", { class: "grow" }, other ? `alpha minus that of ${index.models[against].id}` : "Alpha by layer and module"), compare()),
      map.root,
      make("div", { class: "bar" }, rampLegend(stops, (stop, at) => other ? (stop === 0 ? "0" : String(Number(stop.toPrecision(2)))) : at === 0 ? "1" : at === stops.length - 1 ? "12+" : String(stop), "colours"),
        make("span", { class: "note" }, other ? `Median |Δalpha| ${figure(middle, 4)}. Hatched: no such layer or no fit.` : `2 to 6 is where well-trained layers are expected; neutral at 4. Hatched: no valid fit.${layout.layer.includes(null) ? " Column –: matrices outside the numbered layers." : ""}`)));
    waiting.push(() => map.draw());
  }

  function compare() {
    const possible = index.models.filter((m) => m.number !== number && (m.layout === about.layout || m.number === about.parent || about.nearest?.[0] === m.number || m.parent === number || m.number === against));
    if (!possible.length) return null;
    const select = make("select", { "aria-label": "compare with", onchange: () => { location.hash = `#/model/${number}${select.value === "" ? `/${current}` : `/vs/${select.value}/${current}`}`; } },
      make("option", { value: "" }, "compare with …"),
      ...possible.map((m) => make("option", { value: String(m.number), selected: m.number === against }, m.id + (m.number === about.parent ? " (stated base)" : m.number === about.nearest?.[0] ? " (nearest base)" : ""))));
    return select;
  }

  function drawLayer() {
    const name = layout.names[current];
    const figures = own.figures;
    const xmin = figures?.get("xmin")?.[current];
    const reason = reasonOf(about, current);
    const alpha = own.alpha[current];
    const sketch = own.spectra?.[current] ?? null;
    const edge = figures?.get("bulk_max")?.[current];
    const steps = [["Previous", -1], ["Next", 1]].map(([word, step]) => make("button", { type: "button", disabled: current + step < 0 || current + step >= layout.names.length, onclick: () => choose(current + step) }, word));
    const [low, high] = ["alpha_lo", "alpha_hi"].map((key) => figures?.get(key)?.[current]);
    const interval = present(low) && present(high) && figure(low) !== figure(high) ? ` (${figure(low)} to ${figure(high)} over near-ties)` : "";
    const head = make("div", { class: "bar" }, make("h2", { class: "grow" }, name), make("span", { class: "together" }, ...steps));
    const told = reason !== null ? make("p", { class: "bad" }, `No valid fit: ${reason}`) : make("p", {}, `alpha ${figure(alpha)}${interval}, D ${figure(own.D[current])}${present(xmin) ? `, xmin ${figure(xmin)}` : ""}`);
    const charts = sketch ? make("div", { class: "pair" }, ...spectrumCharts(sketch, { alpha, xmin, edge, name, count: figures?.get("num_evals")?.[current] ?? Infinity, tail: figures?.get("num_pl_spikes")?.[current] }).map((each) => make("div", {}, ...each))) : make("p", { class: "note" }, whyNone());
    const keys = sketch ? legend([["eigenvalues", "var(--accent)"], ...(present(alpha) ? [["fitted power law, from xmin on", "var(--fit)"]] : []), ...(present(edge) ? [["edge of the Marchenko–Pastur bulk", "var(--edge)"]] : [])]) : null;
    const cells = [["M × N", `${layout.rows[current]} × ${layout.columns[current]}`], ["weights", many(layout.params[current])],
      ...(figures ? [...figures].filter(([, values]) => present(values[current])).map(([key, values]) => [key, figure(values[current], 4)]) : [])];
    panel.replaceChildren(make("section", { class: "card" }, head, told, charts, keys,
      make("dl", { class: "figures" }, ...cells.map(([key, value]) => make("div", {}, make("dt", { title: index.meanings[key] }, key), make("dd", {}, value)))),
      ...about.notes.filter(([at]) => at === current).map(([, column, why]) => make("p", { class: "warn" }, `${fitOf(column)}: ${index.reasons[why]}`)),
      meanings(cells.map(([key]) => key)),
      about.left_out ? make("p", { class: "note" }, "Its other figures were left out to keep the page small; they are in stats/.") : null));
  }

  // For touch, which has no tooltips, and for whoever reads all of them.
  function meanings(keys) {
    const known = ["alpha", "D", ...keys].filter((key) => index.meanings[key]);
    return make("details", { class: "meanings", open: meaningsOpen, ontoggle: (event) => { meaningsOpen = event.target.open; } }, make("summary", {}, "What these figures mean"),
      make("p", { class: "note" }, "Eigenvalues λ are squared singular values, not divided by the matrix's size."),
      make("dl", {}, ...known.flatMap((key) => [make("dt", {}, key), make("dd", {}, index.meanings[key])])));
  }

  function whyNone() {
    if (!own.spectra && about.stored) return "The spectra of this model were left out to keep the page small; gpuherd esd plot draws any.";
    if (!own.spectra) return "No spectra are stored for this model: results that were imported or made by an older gpuherd have none.";
    return "No spectrum is stored for this matrix.";
  }

  const source = about.parent !== null ? make("span", {}, `${about.relation || "from"} of `, link(about.parent)) : about.source ? `${about.relation || "from"} of ${about.source} (not in this run)` : about.relation || null;
  const facts = [[about.fitted.toLocaleString("en"), "matrices with a fit"], about.without ? [String(about.without), "without a fit"] : null, about.skipped ? [String(about.skipped), "not analysed"] : null,
    [many(about.params), "weights"], present(about.covered) ? [percent(about.covered), "of the checkpoint covered"] : null, [figure(about.mean), "mean alpha"], [figure(about.median), "median alpha"], [figure(about.d), "median D"]].filter(Boolean);
  const nearest = about.nearest ? make("p", { class: contradicted(about) ? "warn" : "note" }, "Nearest base of this run: ", link(about.nearest[0]), ` (median |Δalpha| ${figure(about.nearest[1], 4)}${about.stated && about.nearest[0] !== about.parent ? `, stated one: ${figure(about.stated[1], 4)}` : ""}): ${VERDICTS[about.verdict].words}`) : null;
  const missing = withAlphas(about) ? null : make("p", { class: "note warn" }, "Alpha and D of its matrices were left out to keep the page small; they are in stats/, and gpuherd esd plot --kind alpha draws them.");
  const depth = depthChart(layout, own.alpha, "alpha over depth, by module");
  const rows = table({ label: "all matrices", rows: layout.names.map((_, at) => at), words: (at) => `${layout.names[at]} ${reasonOf(about, at) ?? ""}`, mark: (at) => at === current,
    columns: [
      { word: "matrix", kind: "name", key: (at) => layout.names[at], cell: (at) => make("button", { type: "button", class: "plain", onclick: () => choose(at, true) }, layout.names[at]) },
      { word: "M", kind: "num rare", key: (at) => layout.rows[at], cell: (at) => String(layout.rows[at]) },
      { word: "N", kind: "num rare", key: (at) => layout.columns[at], cell: (at) => String(layout.columns[at]) },
      { word: "alpha", kind: "num", why: index.meanings.alpha, key: (at) => own.alpha[at], cell: (at) => figure(own.alpha[at]) },
      { word: "D", kind: "num", why: index.meanings.D, key: (at) => own.D[at], cell: (at) => figure(own.D[at]) },
      ...["xmin", "num_evals", "stable_rank"].filter((key) => own.figures?.has(key)).map((key) => ({ word: key, kind: "num rare", why: index.meanings[key], key: (at) => own.figures.get(key)[at], cell: (at) => figure(own.figures.get(key)[at]) })),
      { word: "without a fit because", kind: "rare", key: (at) => reasonOf(about, at), cell: (at) => reasonOf(about, at) ?? "" },
    ] });
  const summary = make("section", { class: "card" }, make("h2", {}, about.id), source ? make("div", { class: "soft" }, source) : null,
    make("div", { class: "facts" }, ...facts.map(([value, word]) => make("span", {}, make("b", {}, value), ` ${word}`))), nearest, missing);
  const all = make("section", { class: "card" }, make("h3", {}, "All matrices"), rows);
  if (missing) return [summary, all]; // nothing to draw: a heat map would say that there is no fit
  drawLayer();
  await drawHeat();
  const small = make("section", { class: "card" }, make("h3", {}, "How alpha is distributed"), ...alphaHistogram([...(index.models.length > 1 ? [{ word: "all models", counts: index.pooled, colour: "var(--soft)", fill: true }] : []), { word: "this model", counts: alphaCounts(own.alpha), colour: LINES[0] }], { label: "histogram of alpha" }),
    legend([["this model", LINES[0]], ...(index.models.length > 1 ? [["all models of the run", "var(--soft)"]] : [])]));
  return [summary, heat, panel, depth ? make("div", { class: "pair" }, small, make("section", { class: "card" }, make("h3", {}, "Alpha over depth"), depth)) : small, all];
}
