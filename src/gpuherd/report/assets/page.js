// The core of every page: elements, numbers as words, unpacking, tables, charts, views. What strangers wrote enters the
// page as text nodes only. A view is a tree of nodes that Python made (report/nodes.py): text, or [tag, attributes,
// ...children], where the tag is an HTML element or one of `widgets`.

let index = null; // what the page declares: views, the state that it begins with, and what its own scripts need
const state = {}; // what readers chose, by key; an array where several can be chosen
const scripts = {}; // views that a page's own script draws: name -> (words of the address) => nodes

const make = (tag, attributes, ...children) => dress(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => dress(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

function dress(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name !== "href" || value.startsWith("#")) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

function build(node) {
  if (node === null || node === undefined) return [];
  if (!Array.isArray(node)) return marked(String(node));
  const [tag, attributes, ...children] = node;
  if (Object.hasOwn(widgets, tag)) return [widgets[tag](attributes, children)].flat();
  return [make(tag, attributes, ...children.map(build))];
}

// ---- text and numbers

// Control characters but for tab and line feed, soft hyphens, marks of direction, joiners of no width, separators,
// fillers that are blank, tags and the variation selectors that no writing uses (texts are hidden in both), private use,
// halves of pairs: written out.
const UNSEEN = new RegExp("[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4" +
  "\\u17b5\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u2800\\u3164\\ufeff\\uffa0\\ufff9-\\ufffb\\ufffe" +
  "\\uffff\\u{1d173}-\\u{1d17a}\\u{e0000}-\\u{e0fff}\\p{Co}\\p{Cs}]", "gu");
const code = (sign) => sign.codePointAt(0).toString(16);
const escaped = (sign) => code(sign).length > 4 ? `\\u{${code(sign)}}` : `\\u${code(sign).padStart(4, "0")}`;
const plain = (text) => text.replace(UNSEEN, escaped);

function marked(text) {
  const nodes = [];
  let from = 0;
  for (const { 0: sign, index: at } of text.matchAll(UNSEEN)) {
    if (at > from) nodes.push(text.slice(from, at));
    nodes.push(make("span", { class: "sign", title: "a sign that can't be seen" }, escaped(sign)));
    from = at + sign.length;
  }
  return from < text.length ? [...nodes, text.slice(from)] : nodes;
}

// A text in a box of its own, which what stands in it can't leave; it may have been cut: [beginning, characters left out].
const beginning = (text) => Array.isArray(text) ? text[0] : text;
const leftOut = (count) => count ? make("span", { class: "left-out" }, ` … ${count.toLocaleString("en")} more characters are in answers.jsonl`) : null;
function textBox(text, attributes = {}) {
  return make("div", { dir: "auto", tabindex: 0, ...attributes, class: `text ${attributes.class ?? "framed"}` },
    beginning(text) === "" ? make("span", { class: "soft" }, "(empty)") : marked(beginning(text)),
    leftOut(Array.isArray(text) ? text[1] : 0));
}

const say = (text) => { document.getElementById("said").textContent = text; };
const present = (value) => value !== null && value !== undefined && !Number.isNaN(value);
const isNarrow = () => innerWidth < 640;
const isDark = () => document.documentElement.dataset.theme === "dark";

function figure(value, digits = 3) {
  if (!present(value)) return "–";
  const size = Math.abs(value);
  if (value === 0 || Number.isInteger(value) && size < 1e6) return String(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2);
  if (size < 0.1) return value.toPrecision(digits);
  if (size < 10) return value.toFixed(digits);
  return value.toFixed(size >= 1e4 ? 0 : size >= 100 ? 1 : Math.min(2, digits));
}

// 100 % is all, and 0 % is nothing.
function percent(value) {
  if (!present(value)) return "–";
  if (value === 0 || value === 1) return `${100 * value} %`;
  return value < 0.0005 ? "< 0.1 %" : value >= 0.9995 ? "> 99.9 %" : `${(100 * value).toFixed(1)} %`;
}

function many(value) {
  if (!present(value)) return "–";
  const [size, unit] = [[1e9, " B"], [1e6, " M"], [1e3, " k"]].find(([each]) => value >= each) ?? [1, ""];
  return unit ? (value / size).toPrecision(3) + unit : String(value);
}

const FORMATS = { figure, percent, many, figure4: (value) => figure(value, 4), text: (value) => present(value) ? value : "–" };

// ---- what the page holds: report.packing undone

const blob = (name) => document.getElementById(name).textContent;

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const inflatedText = async (text) => new TextDecoder().decode(await inflate(text));
const parsed = async (name) => JSON.parse(await inflatedText(blob(name)));
const floats = async (text) => new Float32Array(interleaved(await inflate(text), 4));

// All first bytes stand first.
function interleaved(bytes, width) {
  const count = bytes.length / width;
  const out = new Uint8Array(bytes.length);
  for (let weight = 0; weight < width; weight++) {
    for (let at = 0; at < count; at++) out[at * width + weight] = bytes[weight * count + at];
  }
  return out.buffer;
}

// ---- widgets

let tip = null;
function showTip(x, y, lines) {
  if (!tip?.isConnected) document.body.append(tip = make("div", { class: "tip" }));
  tip.replaceChildren(...lines.map((each) => make("div", {}, plain(each))));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - width - 8))}px`;
  tip.style.top = `${Math.max(4, y + 16 + height > innerHeight ? y - height - 10 : y + 16)}px`;
}
function hideTip() { if (tip) tip.hidden = true; }

const chosen = (key) => [state[key]].flat();
async function set(key, value) {
  const main = document.getElementById("main");
  main.style.minHeight = `${main.offsetHeight}px`; // what is in sight stays where it is
  state[key] = value;
  await show();
  main.style.minHeight = "";
}
const labelled = (input, children) => children.length ? make("label", { class: "together" }, input, ...children.map(build)) : input;

const widgets = {
  // Children that are there while the reader has chosen one of the values of the key; [] is none at all.
  when(wanted, children) {
    const holds = ([key, values]) => Array.isArray(values) && !values.length ? !chosen(key).length
      : [values].flat().some((each) => chosen(key).includes(each));
    return Object.entries(wanted).every(holds) ? children.flatMap(build) : [];
  },
  // A box that turns a key on and off, or with a value adds it to the key's chosen ones.
  check({ key, value, label, most }, children) {
    const on = value === undefined ? state[key] : chosen(key).includes(value);
    const input = make("input", { type: "checkbox", id: `${key}=${value ?? ""}`, "aria-label": label, checked: on, onchange: () => {
      if (value === undefined) { set(key, input.checked); return; }
      if (input.checked && chosen(key).length >= most) { input.checked = false; say(`at most ${most} at a time`); return; }
      set(key, input.checked ? [...chosen(key), value] : chosen(key).filter((each) => each !== value));
    } });
    return labelled(input, children);
  },
  // A list to choose a key's value from.
  choose({ key, label, options, changed = (value) => set(key, value) }) {
    const list = make("select", { id: key, "aria-label": label, onchange: () => changed(options[list.selectedIndex][0]) },
      ...options.map(([value, word]) => make("option", { selected: value === state[key], value }, plain(word))));
    return make("label", { class: "together" }, label, list);
  },
  // A button that gives a key a value.
  pick: ({ key, value, title }, children) =>
    make("button", { type: "button", class: "plain", id: `${key}:${value}`, title, onclick: () => { set(key, value); } }, ...children.map(build)),
  // The stroke and colour of a line.
  key: ({ colour, dash }, children) => make("span", { class: "key" }, keyLine(colour, dash), ...children.map(build)),
  // A dot between two ends on a scale, all as shares of its width; at: a line to compare with; band: what is shaded.
  interval({ value, low, high, at, band, faint, label }) {
    const place = (name, from, to = from) => {
      const part = make("span", { class: name });
      [part.style.left, part.style.width] = [`${100 * from}%`, from === to ? "" : `${100 * (to - from)}%`];
      return part;
    };
    return make("span", { class: faint ? "interval faint" : "interval", role: "img", "aria-label": label },
      band ? place("band", ...band) : null, present(at) ? place("at", at) : null,
      present(low) ? place("reach", low, high) : null, present(value) ? place("dot", value) : null);
  },
  // Shares of a whole, beside each other.
  shares({ counts, label }) {
    const parts = counts.map((count, at) => { const part = make("span", { class: `fill v${at}` }); part.style.flexGrow = count; return part; });
    return make("div", { class: "shares", role: "img", "aria-label": label }, ...parts);
  },
  table: (about) => table(about),
  chart: (about) => chart(about),
};

function keyLine(colour, dash) {
  const root = svg("svg", { viewBox: "0 0 22 6", class: "key-line", "aria-hidden": "true" });
  root.append(svg("line", { x1: 0, x2: 22, y1: 3, y2: 3, stroke: colour, "stroke-width": 2.5, "stroke-dasharray": dash?.join(" ") }));
  return root;
}

// ---- tables: sorted by their headings, filtered by words, a page at a time

const arranged = new Map(); // how readers have sorted and filtered each table

// columns of Python: {word, why, kind, key, format}, where key is the place in a row of its value, which sorts and is
// shown by the format; without a format it is [value, node]. Those of scripts have functions of a row: key(row), which
// sorts, and cell(row). words(row): what a filter looks through.
function table({ columns, rows, label, name = label, sort = null, descending = false, page = 100, words, hint = words ? "filter by words" : null, mark }) {
  const now = arranged.get(name) ?? { sort, descending, page: 0, filter: "" };
  arranged.set(name, now);
  const valueOf = (row, { key }) => typeof key === "function" ? key(row) : Array.isArray(row[key]) ? row[key][0] : row[key];
  const cellOf = (row, column) => {
    if (column.cell) return [column.cell(row)].flat();
    const cell = row[column.key];
    return column.format ? [FORMATS[column.format](cell)] : Array.isArray(cell) ? build(cell[1]) : build(cell);
  };
  const wordsOf = words ?? ((row) => columns.map((column) => valueOf(row, column) ?? "").join(" "));
  const body = make("tbody");
  const heads = columns.map((column, at) => make("th", { class: column.kind, scope: "col", title: column.why },
    column.sorts === false || column.key === undefined ? column.word : make("button", { type: "button", onclick: () => order(at) }, column.word)));
  const whole = make("table", { "aria-label": label }, make("thead", {}, make("tr", {}, ...heads)), body);
  const told = make("span");
  const [back, on] = [["Earlier", -1], ["Later", 1]].map(([word, step]) =>
    make("button", { type: "button", onclick: () => { now.page += step; fill(); } }, word));
  const search = make("input", { type: "search", placeholder: hint, "aria-label": `${label}: ${hint}`,
    oninput: () => { now.filter = search.value; now.page = 0; fill(); } });
  search.value = now.filter;
  const pager = make("div", { class: "pager" }, back, told, on);

  function order(at) {
    Object.assign(now, { descending: now.sort === at ? !now.descending : /num/.test(columns[at].kind), sort: at, page: 0 });
    fill();
  }

  function found() {
    const parts = now.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = parts.length ? rows.filter((row) => { const all = wordsOf(row).toLowerCase(); return parts.every((part) => all.includes(part)); }) : [...rows];
    if (now.sort === null) return kept;
    const sign = now.descending ? -1 : 1;
    return kept.map((row) => [valueOf(row, columns[now.sort]), row]).sort(([a], [b]) => {
      if (!present(a) || !present(b)) return present(a) ? -1 : present(b) ? 1 : 0; // without a value: always last
      return sign * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
    }).map(([, row]) => row);
  }

  function fill() {
    const kept = found();
    const pages = Math.max(1, Math.ceil(kept.length / page));
    now.page = Math.min(Math.max(0, now.page), pages - 1);
    const from = now.page * page;
    body.replaceChildren(...kept.slice(from, from + page).map((row) => make("tr", { class: mark?.(row) ? "chosen" : null },
      ...columns.map((column) => make("td", { class: column.kind }, ...cellOf(row, column))))));
    heads.forEach((head, at) => {
      if (now.sort === at) head.setAttribute("aria-sort", now.descending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    [back.hidden, on.hidden] = [pages === 1, pages === 1];
    [back.disabled, on.disabled] = [now.page === 0, now.page === pages - 1];
    told.textContent = kept.length === 0 ? "nothing matches" : pages === 1 && kept.length === rows.length ? ""
      : `${from + 1} to ${Math.min(kept.length, from + page)} of ${kept.length}`;
    pager.hidden = told.textContent === "";
  }

  fill();
  const root = make("div", {}, hint ? make("div", { class: "bar" }, make("div", { class: "grow" }, search)) : null,
    make("div", { class: "scroll" }, whole), pager);
  root.fill = fill;
  return root;
}

// ---- charts: Vega-Lite, which is unpacked when the first one is drawn

let vega = null;
function loadVega() {
  vega ??= inflatedText(blob("vega")).then((text) => { document.head.append(make("script", {}, text)); });
  return vega; // the policy knows the script by its hash
}

let waiting = []; // charts of this view that are to be drawn once it stands
const CONFIG = {
  aria: false, background: null, font: "system-ui, sans-serif", view: { stroke: null },
  axis: { gridColor: "var(--grid)", domain: false, ticks: false, labelColor: "var(--soft)", titleColor: "var(--ink)",
    titleFontWeight: "normal", labelFontSize: 11, titleFontSize: 11, labelPadding: 5, labelLimit: 100 },
};

// data: rows by the name that the specification calls them by; select: a key, of which rows with another value of
// `series` are left out. Marks with a tooltip are read off by the pointer and by the arrow keys; `along`: all marks of
// one x are read together, as of lines.
function chart({ spec, data, label, select = null, along = false, note = null }) {
  const root = make("div", { class: along ? "chart along" : "chart" });
  const keeps = (row) => !select || row.series === undefined || chosen(select).includes(row.series);
  const datasets = Object.fromEntries(Object.entries(data).map(([name, rows]) => [name, rows.filter(keeps)]));
  waiting.push(() => draw(root, { ...spec, datasets }, label, along));
  return [root, note ? make("p", { class: "note" }, note) : []].flat();
}

async function draw(root, spec, label, along) {
  await loadVega();
  if (!root.isConnected) return;
  const full = { ...spec, width: root.clientWidth, autosize: { type: "fit-x", contains: "padding" } };
  const options = { ast: true, actions: false, renderer: "svg", defaultStyle: false, tooltip: () => {}, config: CONFIG };
  const { view } = await vegaEmbed(root, full, options);
  const picture = root.querySelector("svg");
  const items = [];
  (function gather(node) {
    if (node.tooltip) items.push({ mark: node._svg, x: Math.round(node.x ?? 0), lines: String(node.tooltip).split("\n") });
    for (const each of node.items ?? []) gather(each);
  })(view.scenegraph().root);
  walked(root, picture, along ? together(items) : items.map(({ mark, lines }) => ({ marks: [mark], lines })), along);
  for (const [name, value] of [["role", "img"], ["aria-label", plain(label)], ["tabindex", items.length ? "0" : null]]) {
    if (value !== null) picture.setAttribute(name, value);
  }
}

// The marks of one x after the other.
function together(items) {
  const stops = new Map();
  for (const { mark, x, lines } of items) stops.set(x, [...(stops.get(x) ?? []), { mark, lines }]);
  return [...stops].sort(([a], [b]) => a - b).map(([, all]) =>
    ({ marks: all.map(({ mark }) => mark), lines: [...new Set(all.flatMap(({ lines }) => lines))] }));
}

// Under the pointer a stop tells its lines; the arrow keys, Home and End walk through all of them.
function walked(root, picture, stops, along) {
  let front = -1;
  for (const mark of stops.flatMap(({ marks }) => marks)) mark.classList.add("stop");
  const place = (stop) => stop.marks[0].getBoundingClientRect();
  const turn = (name, stop) => { for (const each of root.querySelectorAll(`.${name}`)) each.classList.remove(name); stop?.marks.forEach((mark) => mark.classList.add(name)); };
  const leave = () => { hideTip(); turn("near"); };
  picture.addEventListener("pointermove", (event) => {
    const middle = (stop) => { const box = place(stop); return Math.abs(box.left + box.width / 2 - event.clientX); };
    const under = along ? stops.reduce((best, each) => !best || middle(each) < middle(best) ? each : best, null) : stops.find(({ marks }) => marks.includes(event.target));
    if (!under) { leave(); return; }
    turn("near", under);
    showTip(event.clientX, event.clientY, under.lines);
  });
  picture.addEventListener("pointerleave", leave);
  picture.addEventListener("blur", () => { leave(); turn("front"); });
  picture.addEventListener("keydown", (event) => {
    const to = { ArrowRight: front + 1, ArrowLeft: front - 1, Home: 0, End: stops.length - 1 }[event.key];
    if (to === undefined || !stops.length) return;
    event.preventDefault();
    front = Math.max(0, Math.min(stops.length - 1, to));
    turn("front", stops[front]);
    const box = place(stops[front]);
    showTip(box.left, box.top, stops[front].lines);
    say(stops[front].lines.map(plain).join(", "));
  });
}

// ---- views, by the address behind the #

let asked = 0; // how often a view was asked for: one that is ready late must not replace a later one

const opened = new Map(); // views that Python declared, unpacked
function declared(name) {
  if (!opened.has(name)) opened.set(name, parsed(`view-${name}`));
  return opened.get(name);
}

async function show() {
  hideTip();
  const turn = ++asked;
  const words = location.hash.replace(/^#\/?/, "").split("/");
  const view = index.views.find(({ name }) => name === words[0]) ?? index.views.find(({ name }) => name === index.first);
  const links = index.views.filter(({ title }) => title).map(({ name, title, count }) =>
    make("a", { href: `#/${name}`, "aria-current": name === (view.under ?? view.name) ? "page" : null }, title,
      present(count) ? make("span", { class: "count" }, ` ${count}`) : null));
  document.getElementById("views").replaceChildren(...links);
  waiting = [];
  const nodes = scripts[view.name] ? await scripts[view.name](words.slice(1)) : (await declared(view.name)).flatMap(build);
  if (turn !== asked) return;
  const front = document.activeElement?.id;
  document.getElementById("main").replaceChildren(...nodes);
  if (front) document.getElementById(front)?.focus({ preventScroll: true }); // what was pressed stays in front
  const current = document.querySelector("nav a[aria-current]");
  if (current) current.parentElement.scrollLeft = current.offsetLeft - 60;
  await drawWaiting();
  if (turn === asked) document.body.dataset.shown = location.hash; // for whoever waits for it
}

async function drawWaiting() {
  for (const work of waiting.splice(0)) await work();
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  document.getElementById("theme").textContent = name === "dark" ? "Light" : "Dark";
  if (document.querySelector("canvas, .ramp")) show(); // which have colours of their own
}

async function start() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(dark.matches ? "dark" : "light");
  const main = document.getElementById("main");
  if (typeof DecompressionStream === "undefined" || !Array.prototype.toReversed) {
    main.textContent = "This browser is too old for this page: it needs one of 2023 or later.";
    return;
  }
  index = await parsed("index");
  Object.assign(state, index.state);
  await scripts.start?.();
  document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
  document.getElementById("theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  addEventListener("hashchange", async () => { await show(); scrollTo(0, 0); });
  let [settling, width] = [null, innerWidth];
  addEventListener("resize", () => {
    clearTimeout(settling);
    settling = setTimeout(() => { if (innerWidth !== width) { width = innerWidth; show(); } }, 150);
  });
  await show();
  document.body.dataset.ready = "yes";
}
