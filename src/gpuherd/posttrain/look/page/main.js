// Views by the address behind the #, the theme, and the start.

// What is looked at; kept from view to view.
const state = { every: false, figures: false, figure: "pass@1", drawn: null, sample: null, beside: null, kind: "all", problem: 0 };

const VIEWS = [
  ["summary", "Summary", () => summaryView()],
  ["rounds", "Rounds", () => roundsView()],
  ["kl", "KL", () => divergenceView()],
  ["learning", "Learning", () => learningView()],
  ["jobs", "Jobs", () => jobsView()],
  ["samples", "Samples", () => samplesView()],
];
const HAS = {
  summary: () => index.rows.length,
  rounds: () => new Set(index.rows.map((row) => row.round).filter(present)).size > 1,
  kl: () => index.comparisons.length && index.rows.some((row) => row.algorithm !== index.reference && present(row.figures.kl?.value)),
  learning: () => index.trainings.length,
  jobs: () => index.timeline,
  samples: () => index.samples.length,
};
let asked = 0;

async function show() {
  hideTip();
  const turn = ++asked;
  const [name] = location.hash.replace(/^#\/?/, "").split("/");
  const there = VIEWS.filter(([each]) => HAS[each]());
  const view = there.find(([each]) => each === name) ?? there[0] ?? VIEWS[0];
  document.getElementById("views").replaceChildren(...there.map(([each, title]) => make("a", { href: `#/${each}`, "aria-current": view[0] === each ? "page" : null }, title)));
  const nodes = await view[2]();
  if (turn !== asked) return;
  const front = document.activeElement?.id;
  document.getElementById("main").replaceChildren(...nodes.filter(Boolean));
  if (front) document.getElementById(front)?.focus(); // a button that was pressed stays in front
  document.querySelector("nav a[aria-current]").scrollIntoView({ block: "nearest", inline: "nearest" });
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
  if (typeof DecompressionStream === "undefined" || !Array.prototype.toReversed) {
    main.textContent = "This browser is too old for this page: it needs one of 2023 or later.";
    return;
  }
  await readIndex();
  document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
  document.getElementById("theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  addEventListener("hashchange", async () => { await show(); scrollTo(0, 0); });
  let narrow = isNarrow();
  addEventListener("resize", () => { if (isNarrow() !== narrow) { narrow = isNarrow(); show(); } });
  await show();
  document.body.dataset.ready = "yes";
}

start();
