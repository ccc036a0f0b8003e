// Alpha, or its change, by layer and module: a row a module, a column a layer. A row gets its cells when it comes into
// sight; spectra.css says how wide they are, and keeps the headings in sight. Mouse, touch and arrow keys choose a matrix.

// Where a value lies between the stops: 0 at the first, 1 at the second, and so on.
function placeOn(value, stops) {
  const at = stops.findIndex((stop) => value <= stop);
  return at < 0 ? stops.length - 1 : at === 0 ? 0 : at - 1 + (value - stops[at - 1]) / (stops[at] - stops[at - 1]);
}

// Its colour, between two that the style names for either scheme.
function ramp(value, stops) {
  const place = placeOn(value, stops);
  const at = Math.min(stops.length - 2, Math.floor(place));
  return `color-mix(in srgb, var(--ramp${at}), var(--ramp${at + 1}) ${Math.round(100 * (place - at))}%)`;
}

widgets.heat = (_, children, record) => {
  const { matrices, against } = record;
  const most = Math.max(1e-3, quantile(matrices.map(({ change }) => Math.abs(change)), 0.98) ?? 1);
  const [what, field, stops] = against ? ["Δalpha", "change", [-most, -most / 2, 0, most / 2, most]] : ["alpha", "alpha", ALPHA_STOPS];
  const brief = (value) => against ? value.toFixed(2).replace("-0.00", "0.00") : value.toFixed(1);
  const depths = [...new Set(matrices.map(({ depth }) => depth))].sort((a, b) => (a ?? -1) - (b ?? -1));
  const modules = [...new Set(matrices.map(({ module }) => module))];
  const [columnOf, rowOf] = [depths, modules].map((all) => new Map(all.map((each, at) => [each, at])));
  const placeOf = ({ depth, module }) => [columnOf.get(depth), rowOf.get(module)];
  const grid = new Map(matrices.map((one) => [placeOf(one).join(), one]));
  const at = (column, row) => grid.get(`${column},${row}`);

  function cell(one) {
    const value = one?.[field];
    const kind = !one ? "" : !present(value) ? "hatched" : placeOn(value, stops) < 0.75 || placeOn(value, stops) > 3.2 ? "end" : "middle";
    const found = make("span", { class: `cell ${kind}`, "data-at": one?.number }, present(value) && depths.length < 60 ? make("span", {}, brief(value)) : null);
    if (present(value)) found.style.background = ramp(value, stops);
    return found;
  }

  const first = depths[0] === null ? 1 : 0; // the column of what is outside the numbered layers
  const head = make("div", { class: "head" }, make("span", { class: "word" }, make("bdi", {}, "module ↓")), make("span", { class: "layers" }, "layer →"),
    ...depths.map((depth, column) => make("span", { class: column < first || (column - first) % 2 === 0 ? "cell" : "cell second" }, make("span", {}, depth === null ? "–" : String(depth)))));
  const rows = modules.map((module) => make("div", { class: "row" }, make("span", { class: "word", title: plain(module) }, make("bdi", {}, marked(module)))));
  const fill = (row) => { if (rows[row].children.length === 1) rows[row].append(...depths.map((_, column) => cell(at(column, row)))); };
  rows.forEach((row, at) => onceInSight(row, () => fill(at)));
  const root = make("div", { class: "heat", tabindex: 0, role: "application", "aria-roledescription": "heat map",
    "aria-label": `${what} by layer and module; arrow keys go from cell to cell, Enter shows its spectrum` }, head, ...rows);
  const sizes = { columns: depths.length, high: `${Math.max(14, Math.min(26, Math.floor(420 / modules.length)))}px`, names: `${6.2 * Math.max(9, ...modules.map((word) => word.length)) + 12}px` };
  for (const [name, size] of Object.entries(sizes)) root.style.setProperty(`--${name}`, size);
  let place = placeOf(matrices[state.layer]);

  function told(one) {
    const value = one[field];
    const more = against ? `, from ${figure(one.theirs)} to ${figure(one.alpha)}` : `, D ${figure(one.D)}`;
    return [one.name, present(value) ? `${what} ${figure(value)}${more}` : one.reason ?? (against ? "not in the other model" : "no value"), `${one.rows} × ${one.columns}`];
  }

  // Marks a cell and brings it into sight.
  function reveal(next) {
    place = next;
    fill(place[1]);
    root.querySelector(".front")?.classList.remove("front");
    const front = rows[place[1]].children[place[0] + 1];
    front.classList.add("front");
    const [cell, frame, corner] = [front, root, head.firstChild].map((each) => each.getBoundingClientRect());
    root.scrollLeft += Math.min(0, cell.left - corner.right) + Math.max(0, cell.right - frame.left - root.clientWidth);
    root.scrollTop += Math.min(0, cell.top - corner.bottom) + Math.max(0, cell.bottom - frame.top - root.clientHeight);
  }

  const under = ({ type, target }) => type === "pointerleave" ? undefined : matrices[target.closest("[data-at]")?.dataset.at];
  tellUnderPointer(root, (event) => { const one = under(event); return one ? told(one) : null; });
  root.addEventListener("scroll", hideTip);
  root.addEventListener("click", (event) => { const one = under(event); if (one) { say(told(one).join(", ")); set("layer", one.number); } });
  root.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!step && event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    const within = (at, count) => Math.max(0, Math.min(count - 1, at));
    if (step) reveal([within(place[0] + step[0], depths.length), within(place[1] + step[1], modules.length)]);
    const one = at(...place);
    if (step) say(one ? told(one).join(", ") : "no matrix here");
    else if (one) set("layer", one.number);
  });
  follow("layer", () => reveal(placeOf(matrices[state.layer])), root);
  waiting.push(() => reveal(place));
  const words = stops.map((stop, at) => against ? String(Number(stop.toPrecision(2))) : at === stops.length - 1 ? `${stop}+` : String(stop));
  const legend = make("span", { class: "ramp", role: "img", "aria-label": "colours" }, ...words.map((word) => make("span", {}, word)));
  return [root, make("div", { class: "bar" }, legend, ...built(children, record))];
};
