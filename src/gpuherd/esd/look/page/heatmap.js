// Alpha by layer and module on a canvas: a row a module, a column a layer. Mouse, touch and arrow keys choose a cell.

// about: the layout; values: one for each of its matrices; missing(i) -> why there is none, or null.
function heatmap({ layout, values, stops, tell, missing, more = () => "", onChoose, chosen = null, label }) {
  const depths = [...new Set(layout.layer)].sort((a, b) => (a === null ? -1 : a) - (b === null ? -1 : b));
  const modules = [...new Set(layout.module)];
  const at = new Map(layout.names.map((_, i) => [`${depths.indexOf(layout.layer[i])}/${modules.indexOf(layout.module[i])}`, i]));
  const canvas = make("canvas", { tabindex: 0, role: "application", "aria-roledescription": "heat map", "aria-label": `${label}; arrow keys go from cell to cell, Enter shows its spectrum` });
  const root = make("div", { class: "heat" }, canvas);
  let place = chosen === null ? null : [depths.indexOf(layout.layer[chosen]), modules.indexOf(layout.module[chosen])];
  let size = null;
  const picture = document.createElement("canvas"); // all but the mark, which alone moves with the arrow keys

  const cellAt = ([column, row]) => at.get(`${column}/${row}`);

  function measure() {
    const room = root.clientWidth || 900;
    const small = room < 560;
    const context = canvas.getContext("2d");
    context.font = "11px system-ui, sans-serif";
    const most = small ? 110 : 250;
    const left = Math.min(most, Math.max(...modules.map((word) => context.measureText(word).width)) + 10);
    const cell = Math.max(small ? 14 : 11, Math.min(60, Math.floor((room - left - 4) / depths.length)));
    const high = Math.max(14, Math.min(26, Math.floor(420 / modules.length)));
    return { left, cell, high, top: 18, width: left + cell * depths.length + 2, height: 18 + high * modules.length + 2 };
  }

  function draw() {
    size = measure();
    const scale = devicePixelRatio || 1;
    for (const each of [canvas, picture]) [each.width, each.height] = [size.width * scale, size.height * scale];
    [canvas.style.width, canvas.style.height] = [`${size.width}px`, `${size.height}px`];
    const context = picture.getContext("2d");
    context.scale(scale, scale);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    words(context);
    const numbers = size.cell >= 30 && size.high >= 14;
    modules.forEach((_, row) => depths.forEach((_, column) => cell(context, column, row, numbers)));
    mark();
  }

  function mark() {
    const scale = devicePixelRatio || 1;
    const context = canvas.getContext("2d");
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.drawImage(picture, 0, 0);
    context.scale(scale, scale);
    if (place) {
      context.strokeStyle = colour("mark");
      context.lineWidth = 2;
      context.strokeRect(size.left + place[0] * size.cell, size.top + place[1] * size.high, size.cell - 1, size.high - 1);
    }
  }

  function words(context) {
    context.fillStyle = colour("soft");
    context.textAlign = "right";
    modules.forEach((word, row) => context.fillText(shortened(context, word, size.left - 8), size.left - 6, size.top + (row + 0.5) * size.high));
    context.textAlign = "center";
    const step = Math.ceil(22 / size.cell);
    depths.forEach((depth, column) => {
      if (depth === null) context.fillText("–", size.left + (column + 0.5) * size.cell, 8);
      else if (depth % step === 0) context.fillText(depth, size.left + (column + 0.5) * size.cell, 8);
    });
  }

  function cell(context, column, row, numbers) {
    const i = cellAt([column, row]);
    const [x, y, w, h] = [size.left + column * size.cell, size.top + row * size.high, size.cell - 1, size.high - 1];
    if (i === undefined) return;
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
    const column = Math.floor((event.clientX - box.left - size.left) / size.cell);
    const row = Math.floor((event.clientY - box.top - size.top) / size.high);
    return column < 0 || row < 0 ? null : [column, row];
  }

  function go(next, choose) {
    const i = cellAt(next);
    place = next;
    mark();
    const top = size.top + next[1] * size.high;
    if (top < root.scrollTop) root.scrollTop = top - size.top;
    else if (top + size.high > root.scrollTop + root.clientHeight) root.scrollTop = top + size.high - root.clientHeight;
    const side = size.left + next[0] * size.cell;
    if (side < root.scrollLeft + size.left) root.scrollLeft = side - size.left;
    else if (side + size.cell > root.scrollLeft + root.clientWidth) root.scrollLeft = side + size.cell - root.clientWidth;
    say(i === undefined ? "no matrix here" : told(i).join(", "));
    if (choose && i !== undefined) onChoose(i);
  }

  canvas.addEventListener("mousemove", (event) => {
    const next = under(event);
    const i = next ? cellAt(next) : undefined;
    if (i === undefined) hideTip();
    else showTip(event, told(i));
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
  const choose = (i) => { place = [depths.indexOf(layout.layer[i]), modules.indexOf(layout.module[i])]; mark(); };
  return { root, draw, choose };
}

function shortened(context, word, width) {
  if (context.measureText(word).width <= width) return word;
  // Two modules differ in their stack, in front, or in their last part.
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
