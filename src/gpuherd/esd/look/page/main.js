// Which view is shown: by the address behind "#", so that the browser's own back and bookmarks work.

let index = null;
let redraw = null;
let asked = 0; // how often a view was asked for: one that is ready late must not replace a later one

const VIEWS = [
  ["models", "Models", () => index.models.length, modelsView],
  ["lineage", "Lineage", () => index.models.filter((m) => m.parent !== null || m.source || m.verdict === "close").length, lineageView],
  ["outliers", "Outliers", () => index.outliers.layers.length + index.outliers.more + index.outliers.models.length, outliersView],
  ["failures", "Failures", () => index.failures.length + index.models.reduce((sum, m) => sum + m.without, 0), failuresView],
];

function numbers(words) {
  const [, number, second, third, fourth] = words;
  const against = second === "vs" ? Number(third) : null;
  const layer = second === "vs" ? fourth : second;
  const about = index.models[Number(number)];
  if (!about || (against !== null && !index.models[against])) return null;
  const most = index.layouts[about.layout].names.length;
  return [about.number, /^\d+$/.test(layer) && Number(layer) < most ? Number(layer) : null, against];
}

async function show() {
  hideTip();
  const turn = ++asked;
  const words = location.hash.replace(/^#\/?/, "").split("/");
  const main = document.getElementById("main");
  const place = words[0] === "model" ? numbers(words) : null;
  const view = VIEWS.find(([name]) => name === words[0]) ?? VIEWS[0];
  document.getElementById("views").replaceChildren(...VIEWS.map(([name, word, count]) =>
    make("a", { href: `#/${name}`, "aria-current": (place ? name === "models" : view[0] === name) ? "page" : null }, word, " ", make("span", { class: "count" }, String(count())))));
  redraw = null;
  if (place) {
    const made = await modelView(...place);
    if (turn !== asked) return;
    main.replaceChildren(...made.nodes);
    made.placed();
    redraw = made.placed;
  } else {
    main.replaceChildren(...view[3]());
  }
  document.body.dataset.shown = location.hash; // for whoever waits for it
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  document.getElementById("theme").textContent = name === "dark" ? "Light" : "Dark";
}

async function start() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(dark.matches ? "dark" : "light");
  const main = document.getElementById("main");
  if (typeof DecompressionStream === "undefined") {
    main.textContent = "This browser is too old for this page: it needs one of 2023 or later.";
    return;
  }
  index = await readIndex();
  index.models.forEach((m, number) => { m.number = number; });
  document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
  document.getElementById("theme").addEventListener("click", () => { setTheme(isDark() ? "light" : "dark"); show(); });
  dark.addEventListener("change", () => { setTheme(dark.matches ? "dark" : "light"); show(); });
  addEventListener("hashchange", async () => { await show(); scrollTo(0, 0); });
  let waiting = null;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => redraw?.(), 120); });
  await show();
  document.body.dataset.ready = "yes";
}

start();
