// Alpha by layer and module on a canvas: a row a module, a column a layer. Mouse, touch and arrow keys choose a cell.
// The canvas is as large as what is seen of the map, and stays while the map scrolls under it: only the cells in sight
// are drawn, the headings are always in sight, and a map of thousands of rows is below every browser's largest canvas.

// layout: of the model; values: one for each of its matrices; missing(i) -> why there is none.
function heatmap({ layout, values, stops, tell, missing, more = () => "", onChoose, chosen = null, label }) {
  const depths = [...new Set(layout.layer)].sort((a, b) => (a === null ? -1 : a) - (b === null ? -1 : b));
  const modules = [...new Set(layout.module)];
  const columnOf = new Map(depths.map((depth, column) => [depth, column]));
  const rowOf = new Map(modules.map((word, row) => [word, row]));
  const placeOf = (i) => [columnOf.get(layout.layer[i]), rowOf.get(layout.module[i])];
  const at = new Map(layout.names.map((_, i) => [placeOf(i).join("/"), i]));
  const canvas = make("canvas", { tabindex: 0, role: "application", "aria-roledescription": "heat map", "aria-label": `${label}; arrow keys go from cell to cell, Enter shows its spectrum` });
  const spread = make("div", {}, canvas);
  const root = make("div", { class: "heat" }, spread);
  let place = chosen === null ? null : placeOf(chosen);
  let size = null;

  const cellAt = ([column, row]) => at.get(`${column}/${row}`);

  function measure() {
    const room = root.clientWidth || 900;
    const small = room < 560;
    const context = canvas.getContext("2d");
    context.font = "11px system-ui, sans-serif";
    const widest = modules.reduce((most, word) => Math.max(most, context.measureText(word).width), 0);
    const left = Math.min(small ? 110 : 250, widest + 10);
    const cell = Math.max(small ? 14 : 11, Math.min(60, Math.floor((room - left - 4) / depths.length)));
    const high = Math.max(14, Math.min(26, Math.floor(420 / modules.length)));
    const top = 32;
    return { left, cell, high, top, width: left + cell * depths.length + 2, height: top + high * modules.length + 2 };
  }

  // Fits the map into the room that there is, and draws it.
  function draw() {
    size = measure();
    [spread.style.width, spread.style.height] = [`${size.width}px`, `${size.height}px`];
    [size.wide, size.tall] = [Math.min(size.width, root.clientWidth || size.width), Math.min(size.height, root.clientHeight || size.height)];
    [canvas.style.width, canvas.style.height] = [`${size.wide}px`, `${size.tall}px`];
    if (place) reveal(place);
    else paint();
  }

  // What is in sight, at the place to which the map is scrolled.
  function paint() {
    const scale = devicePixelRatio || 1;
    [canvas.width, canvas.height] = [size.wide * scale, size.tall * scale];
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const { scrollLeft: x, scrollTop: y } = root;
    const columns = [Math.floor(x / size.cell), Math.min(depths.length, Math.ceil((x + size.wide - size.left) / size.cell))];
    const rows = [Math.floor(y / size.high), Math.min(modules.length, Math.ceil((y + size.tall - size.top) / size.high))];
    within(context, size.left, size.top, () => {
      const numbers = size.cell >= 30 && size.high >= 14;
      for (let row = rows[0]; row < rows[1]; row++) for (let column = columns[0]; column < columns[1]; column++) cell(context, column, row, numbers);
      if (place) mark(context);
    });
    words(context, columns, rows);
  }

  // Draws in what is right of and below a corner of the canvas only.
  function within(context, left, top, work) {
    context.save();
    context.beginPath();
    context.rect(left, top, size.wide - left, size.tall - top);
    context.clip();
    work();
    context.restore();
  }

  const corner = ([column, row]) => [size.left + column * size.cell - root.scrollLeft, size.top + row * size.high - root.scrollTop];

  function mark(context) {
    context.strokeStyle = colour("mark");
    context.lineWidth = 2;
    const [x, y] = corner(place);
    context.strokeRect(x + 1, y + 1, size.cell - 3, size.high - 3);
  }

  function words(context, columns, rows) {
    context.fillStyle = colour("soft");
    within(context, 0, size.top, () => {
      context.textAlign = "right";
      for (let row = rows[0]; row < rows[1]; row++) context.fillText(shortened(context, modules[row], size.left - 8), size.left - 6, corner([0, row])[1] + size.high / 2);
    });
    context.textAlign = "center";
    within(context, size.left - 8, 0, () => {
      const step = Math.ceil(22 / size.cell);
      const first = depths[0] === null ? 1 : 0;
      for (let column = columns[0]; column < columns[1]; column++) {
        const depth = depths[column];
        const x = corner([column, 0])[0] + size.cell / 2;
        if (depth === null) context.fillText("–", x, 22);
        else if ((column - first) % step === 0) context.fillText(depth, x, 22);
      }
    });
    context.fillStyle = colour("ink");
    context.textAlign = "left";
    context.fillText("layer →", size.left, 7);
    context.textAlign = "right";
    context.fillText("module ↓", size.left - 6, 7);
  }

  function cell(context, column, row, numbers) {
    const i = cellAt([column, row]);
    if (i === undefined) return;
    const [x, y] = corner([column, row]);
    const [w, h] = [size.cell - 1, size.high - 1];
    const value = values[i];
    if (!present(value)) { hatch(context, x, y, w, h); return; }
    const fill = ramp(value, stops);
    context.fillStyle = fill;
    context.fillRect(x, y, w, h);
    if (numbers) {
      context.fillStyle = inkOn(fill);
      context.textAlign = "center";
      context.fillText(tell(value), x + w / 2, y + h / 2 + 0.5);
    }
  }

  function hatch(context, x, y, w, h) {
    context.save();
    context.beginPath();
    context.rect(x, y, w, h);
    context.clip();
    context.strokeStyle = colour("soft");
    context.globalAlpha = 0.55;
    context.lineWidth = 1;
    context.beginPath();
    for (let at = -h; at < w; at += 5) { context.moveTo(x + at, y + h); context.lineTo(x + at + h, y); }
    context.stroke();
    context.restore();
  }

  function told(i) {
    const value = values[i];
    return [layout.names[i], present(value) ? `${label.split(" ")[0]} ${figure(value)}${more(i)}` : missing(i), `${layout.rows[i]} × ${layout.columns[i]}`];
  }

  function under(event) {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left - size.left, event.clientY - box.top - size.top];
    return x < 0 || y < 0 ? null : [Math.floor((x + root.scrollLeft) / size.cell), Math.floor((y + root.scrollTop) / size.high)];
  }

  // Marks a cell and brings it into sight.
  function reveal(next) {
    place = next;
    const [x, y] = corner(next);
    root.scrollLeft += Math.min(0, x - size.left) + Math.max(0, x + size.cell - size.wide);
    root.scrollTop += Math.min(0, y - size.top) + Math.max(0, y + size.high - size.tall);
    paint();
  }

  function go(next, choose) {
    const i = cellAt(next);
    reveal(next);
    say(i === undefined ? "no matrix here" : told(i).join(", "));
    if (choose && i !== undefined) onChoose(i);
  }

  root.addEventListener("scroll", () => { hideTip(); requestAnimationFrame(paint); });
  canvas.addEventListener("mousemove", (event) => {
    const next = under(event);
    const i = next ? cellAt(next) : undefined;
    if (i === undefined) hideTip();
    else showTip(event.clientX, event.clientY, told(i));
  });
  canvas.addEventListener("mouseleave", hideTip);
  canvas.addEventListener("click", (event) => { const next = under(event); if (next && cellAt(next) !== undefined) go(next, true); });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (step) {
      event.preventDefault();
      const [column, row] = place || [-step[0], -step[1]];
      go([Math.max(0, Math.min(depths.length - 1, column + step[0])), Math.max(0, Math.min(modules.length - 1, row + step[1]))], false);
    } else if ((event.key === "Enter" || event.key === " ") && place) {
      event.preventDefault();
      go(place, true);
    }
  });
  const choose = (i) => reveal(placeOf(i));
  return { root, draw, choose };
}

function shortened(context, word, width) {
  if (context.measureText(word).width <= width) return word;
  // "mlp.experts.7.up_proj" as "m.e.7.up_proj": the numbers and the last word are what differs.
  const parts = word.split(".");
  for (let at = 0; at < parts.length - 1; at++) {
    if (!/^\d+$/.test(parts[at])) parts[at] = parts[at].slice(0, 1);
    if (context.measureText(parts.join(".")).width <= width) return parts.join(".");
  }
  for (let kept = word.length - 1; kept > 3; kept--) {
    const front = Math.floor(kept * 0.4);
    const shown = word.slice(0, front) + "…" + word.slice(word.length - (kept - front));
    if (context.measureText(shown).width <= width) return shown;
  }
  return "…";
}

// The colours, with the numbers that they stand for.
function rampLegend(stops, tellStop, word) {
  const width = 240;
  const root = svg("svg", { viewBox: `0 0 ${width} 30`, class: "ramp", role: "img", "aria-label": word });
  const X = (at) => 18 + at / (stops.length - 1) * (width - 36);
  const steps = 64;
  for (let i = 0; i < steps; i++) {
    const along = (i + 0.5) / steps * (stops.length - 1);
    const from = Math.floor(along);
    const value = stops[from] + (along - from) * (stops[from + 1] - stops[from]);
    root.append(svg("rect", { x: X(i / steps * (stops.length - 1)), y: 2, width: (width - 36) / steps + 0.5, height: 10, fill: ramp(value, stops) }));
  }
  stops.forEach((stop, at) => root.append(svg("text", { x: X(at), y: 25, "text-anchor": "middle" }, tellStop(stop, at))));
  return root;
}
