// A table that sorts by its headings, filters by words, and shows some rows at a time.

// columns: [{word, why, key(row) -> number | string | null, cell(row) -> node | string, num, rare}]
function table({ columns, rows, words = null, sort = null, descending = false, label, mark = null, hint = "filter by words", page = 100 }) {
  let state = { sort, descending, page: 0, filter: "" };
  const body = make("tbody");
  const heads = columns.map((column, at) => make("th", { class: kind(column), scope: "col", title: column.why },
    column.key ? make("button", { type: "button", onclick: () => order(at) }, column.word) : column.word));
  const whole = make("table", { "aria-label": label }, make("thead", {}, make("tr", {}, ...heads)), body);
  const told = make("span");
  const [back, on] = [["Earlier", -1], ["Later", 1]].map(([word, step]) =>
    make("button", { type: "button", onclick: () => { state.page += step; fill(); } }, word));
  const search = make("input", { type: "search", placeholder: hint, "aria-label": `${label}: ${hint}`,
    oninput: () => { state.filter = search.value.toLowerCase(); state.page = 0; fill(); } });
  const pager = make("div", { class: "pager" }, back, told, on);
  const root = make("div", {}, words ? make("div", { class: "bar" }, make("div", { class: "grow" }, search)) : null,
    make("div", { class: "scroll" }, whole), pager);

  function kind(column) {
    return [column.num && "num", column.rare && "rare", column.class].filter(Boolean).join(" ") || null;
  }

  function order(at) {
    state = { ...state, descending: state.sort === at ? !state.descending : Boolean(columns[at].num), sort: at, page: 0 };
    fill();
  }

  function chosen() {
    const parts = state.filter.split(/\s+/).filter(Boolean);
    const found = parts.length ? rows.filter((row) => parts.every((part) => words(row).toLowerCase().includes(part))) : [...rows];
    if (state.sort === null) return found;
    const { key } = columns[state.sort];
    const sign = state.descending ? -1 : 1;
    return found.map((row) => [key(row), row]).sort(([a], [b]) => {
      if (!present(a) || !present(b)) return present(a) ? -1 : present(b) ? 1 : 0; // without a value: always last
      return sign * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
    }).map(([, row]) => row);
  }

  function fill() {
    const found = chosen();
    const pages = Math.max(1, Math.ceil(found.length / page));
    state.page = Math.min(Math.max(0, state.page), pages - 1);
    body.replaceChildren(...found.slice(state.page * page, (state.page + 1) * page).map((row) =>
      make("tr", { class: mark && mark(row) ? "chosen" : null }, ...columns.map((column) => make("td", { class: kind(column) }, column.cell(row))))));
    heads.forEach((head, at) => {
      if (state.sort === at) head.setAttribute("aria-sort", state.descending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    [back.hidden, on.hidden] = [pages === 1, pages === 1];
    [back.disabled, on.disabled] = [state.page === 0, state.page === pages - 1];
    told.textContent = found.length === 0 ? "nothing matches" : pages === 1 && found.length === rows.length ? ""
      : `${state.page * page + 1} to ${Math.min(found.length, (state.page + 1) * page)} of ${found.length}`;
    pager.hidden = told.textContent === "";
  }

  fill();
  return { root, fill };
}
