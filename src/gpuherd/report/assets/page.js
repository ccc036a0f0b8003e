// The core of every page: elements, numbers as words, unpacking, tables, charts, views. What strangers wrote enters the
// page as text nodes only. A view is a tree of nodes that Python made (report/nodes.py): text, or [tag, attributes,
// ...children], where the tag is an element of HTML or SVG or one of `widgets`. A node that is built with a record is a
// template: "{path}" and "{path:format}" in its texts and attributes are the record's fields.

let index = null; // what the page declares: views, the state that it begins with, and what its own scripts need
const state = {}; // what readers chose, by key; an array where several can be chosen
const scripts = {}; // `start`: what a page's own script does first
const records = {}; // what a view is built with: name -> (words of the address) => record, null for no such one
const frames = {}; // records that tables and trees show, by name
const changed = {}; // what follows when a key gets a value: key -> (value) => whether the address shows the rest

const SVG = ["svg", "line", "rect", "circle"];
function make(tag, attributes, ...children) {
  const element = SVG.includes(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name !== "href" || value.startsWith("#")) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

function build(node, record) {
  if (node === null || node === undefined) return [];
  if (!Array.isArray(node)) return marked(record ? filled(node, record) : String(node));
  const [tag, attributes, ...children] = node;
  const own = record ? Object.fromEntries(Object.entries(attributes).map(([name, value]) => [name, bound(value, record)])) : attributes;
  if (Object.hasOwn(widgets, tag)) return [widgets[tag](own, children, record)].flat();
  return [make(tag, own, ...built(children, record))];
}
const built = (nodes, record) => nodes.flatMap((each) => build(each, record));

const lookup = (record, path) => path.split(".").reduce((at, name) => at?.[name], record);
const filled = (text, record) => String(text).replace(/\{([\w.]+)(?::(\w+))?\}/g, (_, path, format = "text") => FORMATS[format](lookup(record, path)));

// An attribute that is one field alone is its value, of whatever type.
function bound(value, record) {
  if (typeof value !== "string") return value;
  const [, path] = /^\{([\w.]+)\}$/.exec(value) ?? [];
  return path ? lookup(record, path) : filled(value, record);
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

// One line of a text.
function brief(text, most) {
  const whole = beginning(text);
  return make("bdi", { dir: "auto" }, marked(whole.slice(0, most).replace(/\s+/g, " ")), whole.length > most ? "…" : null);
}

const say = (text) => { document.getElementById("said").textContent = text; };
const present = (value) => value !== null && value !== undefined && !Number.isNaN(value);
const isNarrow = () => innerWidth < 640;

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

const FORMATS = { figure, percent, many, figure4: (value) => figure(value, 4), text: (value) => present(value) ? value : "–",
  count: (value) => value.toLocaleString("en"), signed: (value) => `${value > 0 ? "+" : ""}${value.toFixed(1)}` };

// ---- what the page holds: report.page packed it

// The work, done once for each key.
function once(work) {
  const done = new Map();
  return (key) => done.get(key) ?? done.set(key, work(key)).get(key);
}

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
// Under the pointer a place tells its lines: linesAt gives them for an event, or nothing.
function tellUnderPointer(root, linesAt) {
  const tell = (event) => {
    const lines = linesAt(event);
    if (lines) showTip(event.clientX, event.clientY, lines);
    else hideTip();
  };
  root.addEventListener("pointermove", tell);
  root.addEventListener("pointerleave", tell);
}

const chosen = (key) => [state[key]].flat();
let live = []; // parts of this view that follow a key: {key, fill, root}; where there are any, they alone are made anew
const follow = (keys, fill, root) => live.push(...[keys].flat().map((key) => ({ key, fill, root })));
async function set(key, value) {
  state[key] = value;
  if (changed[key]?.(value)) return;
  live = live.filter(({ root }) => root.isConnected);
  const parts = live.filter((each) => each.key === key);
  if (parts.length) { keepingFront(() => { for (const { fill } of parts) fill(); }); return drawWaiting(); }
  const main = document.getElementById("main");
  main.style.minHeight = `${main.offsetHeight}px`; // what is in sight stays where it is
  await show();
  main.style.minHeight = "";
}
// What was pressed stays in front.
function keepingFront(work) {
  const front = document.activeElement?.id;
  work();
  if (front) document.getElementById(front)?.focus({ preventScroll: true });
}
// A key that is on or off, or, with a value, whether that is one of the key's chosen ones; and what it becomes when it is
// turned.
const isOn = (key, value) => value === undefined ? state[key] : chosen(key).includes(value);
const turned = (key, value) => value === undefined ? !state[key] : isOn(key, value) ? chosen(key).filter((each) => each !== value) : [...chosen(key), value];

const widgets = {
  // Children that are there while the reader has chosen one of the values of the key; [] is none at all.
  when(wanted, children, record) {
    const holds = ([key, values]) => Array.isArray(values) && !values.length ? !chosen(key).length
      : [values].flat().some((each) => chosen(key).includes(each));
    return Object.entries(wanted).every(holds) ? built(children, record) : [];
  },
  // Children of a template that are there where the record has a field: not empty and not 0; with `known`, any number.
  given({ field, known, not }, children, record) {
    const value = lookup(record, field);
    const has = known ? present(value) : Array.isArray(value) ? value.length > 0 : Boolean(value);
    return has !== Boolean(not) ? built(children, record) : [];
  },
  // Children for each record of a field.
  each: ({ field }, children, record) => lookup(record, field).flatMap((each) => built(children, each)),
  // Children that are made anew when the key, or one of the keys, changes; with `part`, by what that function of the record
  // gives or promises, null for none; with `late`, only once they come into sight.
  live({ key = [], part, id, late, class: kind }, children, record) {
    const root = make("div", { id, class: kind });
    const show = (about) => root.replaceChildren(...about === null ? [] : built(children, about));
    let latest = null; // what is ready late must not replace what was asked for later
    const fill = () => {
      const about = latest = part ? record[part](state[key]) : record;
      if (!(about instanceof Promise)) show(about);
      else waiting.push(async () => { const found = await about; if (about === latest) show(found); });
    };
    follow(key, fill, root);
    if (late) onceInSight(root, () => { fill(); drawWaiting(); });
    else fill();
    return root;
  },
  // Children that are made when it is opened; it stays open from view to view.
  fold: ({ summary, name, class: kind }, children, record) => folded(build(summary, record), () => built(children, record), name, kind),
  // Records of a frame in families: [number or words, members, words of the fold that they are in, if they are in one].
  tree({ frame, families, branch }) {
    const list = (members) => make("ul", { class: "tree" }, ...members.map(item));
    const item = ([of, members = [], words = null]) => make("li", {}, typeof of === "number" ? build(branch, frames[frame][of]) : build(of),
      !members.length ? null : words ? folded(build(words), () => [list(members)]) : list(members));
    return list(families);
  },
  // A box that turns a key on and off, or with a value adds it to the key's chosen ones.
  check({ key, value, label, most }, children, record) {
    const input = make("input", { type: "checkbox", id: `${key}=${value ?? ""}`, "aria-label": label, checked: isOn(key, value), onchange: () => {
      if (!input.checked || !(chosen(key).length >= most)) { set(key, turned(key, value)); return; }
      input.checked = false;
      say(`at most ${most} at a time`);
    } });
    return children.length ? make("label", { class: "together" }, input, ...built(children, record)) : input;
  },
  // What is typed is the key's value, once the reader pauses.
  field({ key, ...attributes }) {
    let settling = null;
    const input = make("input", { id: key, value: state[key], ...attributes, oninput: () => {
      clearTimeout(settling);
      settling = setTimeout(() => { set(key, input.value); }, 100);
    } });
    return input;
  },
  // A button that turns a key on and off, or adds a value to the key's chosen ones; `only`: that is the one chosen.
  toggle({ key, value, only, label, title, class: kind }, children, record) {
    return make("button", { type: "button", class: kind, title, id: `${key}=${value ?? ""}`, "aria-label": label, "aria-pressed": String(isOn(key, value)),
      onclick: () => { set(key, only ? value : turned(key, value)); } }, ...built(children, record));
  },
  // A list to choose a key's value from.
  choose({ key, label, options }) {
    const list = make("select", { id: key, "aria-label": label, onchange: () => { set(key, options[list.selectedIndex][0]); } },
      ...options.map(([value, word]) => make("option", { selected: value === state[key], value }, plain(word))));
    return make("label", { class: "together" }, label, list);
  },
  // A button that gives a key a value.
  pick: ({ key, value, title, class: kind = "plain", disabled, id = `${key}:${value}` }, children, record) =>
    make("button", { type: "button", class: kind, id, title, disabled, onclick: () => { set(key, value); } }, ...built(children, record)),
  // A text of the record, which may be long, in a box of its own; its first words alone.
  text: ({ of, ...attributes }, _, record) => textBox(lookup(record, of), attributes),
  brief: ({ of, most }, _, record) => brief(lookup(record, of), most),
  // A table as it is declared, head and body; the widget "table" has rows that are sorted and filtered.
  grid: ({ label }, children, record) => make("table", { "aria-label": label }, ...built(children, record)),
  table: (about, _, record) => table(about, record),
  chart: (about, _, record) => chart(about, record),
};

const opened = new Set(); // the names of what is unfolded
function folded(summary, fill, name, kind) {
  const root = make("details", { class: kind, open: opened.has(name), ontoggle: () => {
    if (name) opened[root.open ? "add" : "delete"](name);
    if (root.open && root.children.length === 1) root.append(...fill());
  } }, make("summary", {}, summary), opened.has(name) ? fill() : null);
  return root;
}

function onceInSight(root, work) {
  const watcher = new IntersectionObserver((entries) => {
    if (entries.some(({ isIntersecting }) => isIntersecting)) { watcher.disconnect(); work(); }
  }, { rootMargin: "200px" });
  watcher.observe(root);
}

// ---- what tables, lists and charts are filtered by, sorted by and walked through

// Whether a text holds all the words that were typed.
function holdsWords(typed) {
  const words = typed.toLowerCase().split(/\s+/).filter(Boolean);
  const has = (text) => words.every((word) => text.includes(word));
  return (textOf) => !words.length || has(textOf().toLowerCase());
}

// What has no value is always last; what is equal stays in order.
function sortedBy(items, valueOf, descending) {
  const sign = descending ? -1 : 1;
  return items.map((item) => [valueOf(item), item]).sort(([a], [b]) => {
    if (!present(a) || !present(b)) return present(a) ? -1 : present(b) ? 1 : 0;
    return sign * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
  }).map(([, item]) => item);
}

// What a key pressed at a place among so many leads to: by the steps of the keys, or to either end.
function walk(event, at, count, steps, go) {
  const to = { Home: 0, End: count - 1 }[event.key] ?? at + steps[event.key];
  if (Number.isNaN(to) || !count) return;
  event.preventDefault();
  go(Math.max(0, Math.min(count - 1, to)));
}

// ---- tables: sorted by their headings, filtered by words, a page at a time

const arranged = Object.create(null); // how readers have sorted and filtered each table

// columns: {word, why, kind, field, format, shows, given}. The key is the path of a field, or a place in a row, of a value
// that sorts: shown by the format, as the node of [value, node], or by the template `shows` of the record. given: a field of the view's record without which there is no such column. Records are those of
// a frame or of a field of the view's record. words: the fields that the filter looks through; mark: [key, field] of the
// row that a reader has chosen.
function table({ columns: all, rows: given, frame, field, label, name = label, sort = null, descending = false, page = 100, words, hint = null, mark }, record) {
  const columns = all.map((each, at) => ({ ...each, key: each.field ?? String(at) })).filter((each) => !each.given || lookup(record, each.given));
  const rows = frame ? frames[frame] : field ? lookup(record, field) : given;
  const now = arranged[name] ??= { sort, descending, page: 0, filter: "" };
  const valueOf = (row, { key }) => beginning(lookup(row, key));
  const cellOf = (row, { key, format, shows }) => {
    if (shows) return build(shows, row);
    const cell = lookup(row, key);
    return format ? marked(String(FORMATS[format](cell))) : build(Array.isArray(cell) ? cell[1] : cell);
  };
  const wordsOf = (row) => words ? words.map((path) => lookup(row, path) ?? "").join(" ") : columns.map((column) => valueOf(row, column) ?? "").join(" ");
  const marks = (row) => mark && state[mark[0]] === lookup(row, mark[1]);
  const [head, body, pager] = [make("tr"), make("tbody"), make("div", { class: "pager" })];
  const button = (word, change, disabled = false) =>
    make("button", { type: "button", id: `${name}: ${word}`, disabled, onclick: () => { Object.assign(now, change); keepingFront(fill); } }, word);
  const search = make("input", { type: "search", placeholder: hint, value: now.filter, "aria-label": `${label}: ${hint}`,
    oninput: () => { Object.assign(now, { filter: search.value, page: 0 }); fill(); } });

  function heading({ word, why, kind, sorts = true }, at) {
    const sorted = now.sort === at ? (now.descending ? "descending" : "ascending") : null;
    const turned = { sort: at, descending: sorted ? !now.descending : /num/.test(kind), page: 0 };
    return make("th", { class: kind, scope: "col", title: why, "aria-sort": sorted }, sorts ? button(word, turned) : word);
  }

  function fill() {
    const holds = holdsWords(now.filter);
    const found = rows.filter((row) => holds(() => wordsOf(row)));
    const kept = now.sort === null ? found : sortedBy(found, (row) => valueOf(row, columns[now.sort]), now.descending);
    const last = Math.max(0, Math.ceil(kept.length / page) - 1);
    now.page = Math.min(now.page, last);
    const from = now.page * page;
    head.replaceChildren(...columns.map(heading));
    body.replaceChildren(...kept.slice(from, from + page).map((row) => make("tr", { class: marks(row) ? "chosen" : null },
      ...columns.map((column) => make("td", { class: column.kind }, ...cellOf(row, column))))));
    const told = kept.length === 0 ? "nothing matches" : last === 0 && kept.length === rows.length ? "" : `${from + 1} to ${Math.min(kept.length, from + page)} of ${kept.length}`;
    const turning = (word, step) => last ? button(word, { page: now.page + step }, now.page === (step < 0 ? 0 : last)) : "";
    pager.replaceChildren(...told ? [turning("Earlier", -1), told, turning("Later", 1)] : []);
  }

  fill();
  if (mark) follow(mark[0], fill, body);
  return make("div", {}, hint ? make("div", { class: "bar" }, make("div", { class: "grow" }, search)) : null,
    make("div", { class: "scroll" }, make("table", { "aria-label": label }, make("thead", {}, head), body)), pager);
}

// ---- charts: Vega-Lite, which is unpacked when the first one is drawn

// The policy knows the script by its hash.
const loadVega = once(async () => document.head.append(make("script", {}, await inflatedText(blob("vega")))));

let waiting = []; // charts of this view that are to be drawn once it stands

// data: rows by the name that the specification calls them by, or the field of the record that has them: a layer whose
// rows the record has none of is not drawn. select: a key, of which rows with another value of `series` are left out.
// Marks with a tooltip are read off by the pointer and by the arrow keys; `along`: all marks of one x are read together,
// as of lines.
function chart({ spec, data, label, select, along, note }, record) {
  const root = make("div", { class: along ? "chart along" : "chart" });
  const keeps = ({ series }) => !select || series === undefined || chosen(select).includes(series);
  const rowsOf = (rows) => typeof rows === "string" ? lookup(record, rows) : rows.filter(keeps);
  const datasets = Object.fromEntries(Object.entries(data).map(([name, rows]) => [name, rowsOf(rows)]));
  const drawn = ({ data: { name } }) => typeof data[name] !== "string" || datasets[name].length;
  const layers = spec.layer?.every((each) => each.data) ? { layer: spec.layer.filter(drawn) } : {};
  waiting.push(() => draw(root, { ...spec, ...layers, datasets }, label, along));
  return [root, note ? make("p", { class: "note" }, note) : []].flat();
}

async function draw(root, spec, label, along) {
  await loadVega();
  if (!root.isConnected) return;
  const full = { ...spec, width: root.clientWidth, autosize: { type: "fit-x", contains: "padding" } };
  const options = { ast: true, actions: false, renderer: "svg", defaultStyle: false, tooltip: () => {}, config: index.charts };
  const { view } = await vegaEmbed(root, full, options);
  const picture = root.querySelector("svg");
  const items = [];
  (function gather(node) {
    if (node.tooltip) items.push({ mark: node._svg, x: Math.round(node.x ?? 0), lines: String(node.tooltip).split("\n") });
    for (const each of node.items ?? []) gather(each);
  })(view.scenegraph().root);
  const stops = [...Map.groupBy(items, (each) => along ? each.x : each).values()].map((all) => // the marks of one x are one stop
    ({ marks: all.map(({ mark }) => mark), x: all[0].x, lines: [...new Set(all.flatMap(({ lines }) => lines))] }));
  walked(root, picture, along ? stops.sort((a, b) => a.x - b.x) : stops, along);
  Object.assign(picture, { role: "img", ariaLabel: plain(label), ...items.length ? { tabIndex: 0 } : {} });
}

// Under the pointer a stop tells its lines; the arrow keys, Home and End walk through all of them.
function walked(root, picture, stops, along) {
  let front = -1;
  for (const mark of stops.flatMap(({ marks }) => marks)) mark.classList.add("stop");
  const place = (stop) => stop.marks[0].getBoundingClientRect();
  const turn = (name, stop) => {
    for (const each of root.querySelectorAll(`.${name}`)) each.classList.remove(name);
    stop?.marks.forEach((mark) => mark.classList.add(name));
    return stop?.lines;
  };
  function under({ type, target, clientX }) {
    if (type === "pointerleave") return null;
    if (!along) return stops.find(({ marks }) => marks.includes(target));
    const away = (stop) => { const { left, width } = place(stop); return Math.abs(left + width / 2 - clientX); };
    return stops.reduce((best, each) => !best || away(each) < away(best) ? each : best, null);
  }
  tellUnderPointer(picture, (event) => turn("near", under(event)));
  picture.addEventListener("blur", () => { hideTip(); turn("near"); turn("front"); });
  picture.addEventListener("keydown", (event) => walk(event, front, stops.length, { ArrowRight: 1, ArrowLeft: -1 }, (to) => {
    front = to;
    const [lines, box] = [turn("front", stops[front]), place(stops[front])];
    showTip(box.left, box.top, lines);
    say(lines.map(plain).join(", "));
  }));
}

// ---- views, by the address behind the #

let asked = 0; // how often a view was asked for: one that is ready late must not replace a later one

const declared = once((name) => parsed(`view-${name}`));

async function show() {
  hideTip();
  const turn = ++asked;
  const words = location.hash.replace(/^#\/?/, "").split("/");
  const first = index.views.find(({ name }) => name === index.first);
  let view = index.views.find(({ name }) => name === words[0]) ?? first;
  let record = await records[view.name]?.(words.slice(1));
  if (record === null) [view, record] = [first, await records[first.name]?.([])];
  if (turn !== asked) return;
  const links = index.views.filter(({ title }) => title).map(({ name, title, count }) =>
    make("a", { href: `#/${name}`, "aria-current": name === (view.under ?? view.name) ? "page" : null }, title,
      present(count) ? make("span", { class: "count" }, ` ${count}`) : null));
  document.getElementById("views").replaceChildren(...links);
  const own = await declared(view.name);
  if (turn !== asked) return;
  [waiting, live] = [[], []];
  const nodes = built(own, record);
  keepingFront(() => document.getElementById("main").replaceChildren(...nodes));
  const current = document.querySelector("nav a[aria-current]");
  if (current) current.parentElement.scrollLeft = current.offsetLeft - 60;
  await drawWaiting();
  if (turn === asked) document.body.dataset.shown = location.hash; // for whoever waits for it
}

async function drawWaiting() {
  while (waiting.length) await waiting.shift()();
}

// The colours follow the scheme: page.css has both of each. The button is called after the other scheme.
function setDark(dark) {
  document.documentElement.style.colorScheme = dark ? "dark" : "light";
  Object.assign(document.getElementById("theme"), { textContent: dark ? "Light" : "Dark", onclick: () => setDark(!dark) });
}

async function start() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => setDark(dark.matches));
  setDark(dark.matches);
  const main = document.getElementById("main");
  if (!Map.groupBy || !CSS.supports("color", "light-dark(red, red)")) {
    main.textContent = "This browser is too old for this page: it needs one of 2024 or later.";
    return;
  }
  index = await parsed("index");
  Object.assign(state, index.state);
  await scripts.start?.();
  document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
  addEventListener("hashchange", async () => { await show(); scrollTo(0, 0); });
  let [settling, width] = [null, innerWidth];
  addEventListener("resize", () => {
    clearTimeout(settling);
    settling = setTimeout(() => { if (innerWidth !== width) { width = innerWidth; show(); } }, 150);
  });
  await show();
  document.body.dataset.ready = "yes";
}
