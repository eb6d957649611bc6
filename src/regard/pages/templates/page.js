const page = JSON.parse(document.getElementById("data").textContent);
const svgNode = (tag, attributes = {}, text = "") => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  return node;
};
// The tooltip at the pointer.
const tip = $("#tip");
function showTip(event, lines) {
  tip.replaceChildren(...lines.map(([text, color, strong]) => {
    const line = document.createElement("div");
    if (color) { const dot = document.createElement("i"); dot.style.background = `var(${color})`; line.append(dot); }
    line.append(text);
    if (strong) line.style.fontWeight = 600;
    return line;
  }));
  tip.hidden = false;
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  tip.style.left = `${Math.max(8, left) + scrollX}px`;
  tip.style.top = `${Math.max(8, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)) + scrollY}px`;
}
const hideTip = () => { tip.hidden = true; };
const short = (v, digits = 3) => {
  for (const [size, unit] of [[1e9, " G"], [1e6, " M"], [1e3, " k"]])
    if (Math.abs(v) >= size) return String(+(v / size).toPrecision(digits)) + unit;
  return String(+v.toPrecision(digits + 1)).replace("-", "\u2212");
};
const distinct = (values, digits = 3) => {  // labels of ticks, with as many digits as tell them apart
  const texts = values.map((v) => short(v, digits));
  return new Set(texts).size === values.length || digits > 8 ? texts : distinct(values, digits + 1);
};

// Legend: a click on a name hides or shows the row in every figure.
const hidden = new Set();
for (const chip of all(".chip")) chip.addEventListener("click", () => {
  const row = +chip.dataset.row;
  hidden.has(row) ? hidden.delete(row) : hidden.add(row);
  for (const node of all(`svg [data-row="${row}"]`)) node.classList.toggle("off", hidden.has(row));
  for (const node of all(`.chip[data-row="${row}"]`)) node.setAttribute("aria-pressed", String(!hidden.has(row)));
  drawTradeoff();
});

// Learning curves: the selected quantity; the tooltip has the values of all rows at one epoch.
const which = $("#curve-metric");
if (which) which.addEventListener("change", () => {
  for (const figure of all(".curves")) figure.hidden = figure.dataset.metric !== which.value;
});
for (const figure of all(".curves .plot")) {
  const { box, lines } = page.curves[figure.dataset.figure], svg = $("svg", figure);
  const rule = svgNode("line", { class: "rule", y1: box.top, y2: box.bottom });
  svg.append(rule);
  figure.addEventListener("pointermove", (event) => {
    const frame = svg.getBoundingClientRect();
    const share = ((event.clientX - frame.left) / frame.width * box.width - box.left) / (box.right - box.left);
    const at = box.x[0] + share * (box.x[1] - box.x[0]);
    const shown = lines.filter((line) => !hidden.has(line.row));
    if (share < 0 || share > 1 || !shown.length) { hideTip(); rule.classList.remove("on"); return; }
    const epochs = shown[0].epochs;
    const epoch = epochs.reduce((best, e) => Math.abs(e - at) < Math.abs(best - at) ? e : best);
    const x = box.left + (epoch - box.x[0]) / (box.x[1] - box.x[0]) * (box.right - box.left);
    rule.setAttribute("x1", x);
    rule.setAttribute("x2", x);
    rule.classList.add("on");
    const values = shown.map((line) => [line.row, line.mean[line.epochs.indexOf(epoch)]]).filter(([, v]) => v != null);
    const sign = figure.dataset.better === "lower" ? 1 : -1;
    values.sort((a, b) => sign * (a[1] - b[1]));
    showTip(event, [[`epoch ${epoch}`, "", true],
      ...values.map(([row, v]) => [`${page.rows[row].label}  ${short(v)}`, page.rows[row].color])]);
  });
  figure.addEventListener("pointerleave", () => { hideTip(); rule.classList.remove("on"); });
}

// Trade-off: a measured quantity against a cost, with the Pareto front.
const shapes = { o: "M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0Z", s: "M-4.5,-4.5h9v9h-9Z", "^": "M0,-6L5.5,4.5h-11Z",
  D: "M0,-6L6,0L0,6L-6,0Z", v: "M0,6L5.5,-4.5h-11Z", P: "M-2,-6h4v4h4v4h-4v4h-4v-4h-4v-4h4Z",
  X: "M-5,-3l2,-2l3,3l3,-3l2,2l-3,3l3,3l-2,2l-3,-3l-3,3l-2,-2l3,-3Z" };
function ticks(low, high, log) {
  if (log) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const step of [1, 2, 5]) { const v = step * 10 ** power; if (v >= low && v <= high) found.push(v); }
    if (found.length > 1) return found;
  }
  const rough = (high - low) / 5, unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find((f) => f * unit >= rough), found = [];
  for (let k = Math.ceil(low / step); k * step <= high * (1 + 1e-9); k++) found.push(+(k * step).toPrecision(12));
  return found;
}
function scale(values, from, to, log) {
  let low = Math.min(...values), high = Math.max(...values);
  const f = log ? Math.log10 : (v) => v, back = log ? (v) => 10 ** v : (v) => v;
  const room = ((f(high) - f(low)) || Math.abs(f(high)) * 0.1 || 1) * 0.09;
  low = back(f(low) - room); high = back(f(high) + room);
  const place = (v) => from + (f(v) - f(low)) / (f(high) - f(low)) * (to - from);
  return { place, ticks: ticks(low, high, log) };
}
function drawTradeoff() {
  const holder = $("#tradeoff");
  if (!holder) return;
  const xAxis = page.axes.find((axis) => axis.key === $("#x-axis").value);
  const yAxis = page.measures.find((axis) => axis.key === $("#y-axis").value);
  const points = page.rows.map((row, index) => ({ row, index, x: row.x[xAxis.key], y: row.y[yAxis.key] }))
    .filter((p) => p.x != null && p.y != null && !hidden.has(p.index));
  const width = Math.max(300, holder.clientWidth), height = Math.min(460, Math.max(330, width * 0.52));
  const svg = svgNode("svg", { viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `${yAxis.name} against ${xAxis.name}` });
  holder.replaceChildren(svg);
  if (!points.length) { svg.append(svgNode("text", { x: 20, y: 40 }, "No row has both quantities.")); return; }
  const xs = points.map((p) => p.x), log = Math.min(...xs) > 0 && Math.max(...xs) / Math.min(...xs) > 4;
  const x = scale(xs, 48, width - 16, log);
  const y = scale(points.flatMap((p) => [p.y.mean, p.y.low ?? p.y.mean, p.y.high ?? p.y.mean]), height - 44, 30, false);
  const yTexts = distinct(y.ticks), xTexts = distinct(x.ticks);
  for (const [i, t] of y.ticks.entries()) {
    svg.append(svgNode("line", { class: "grid", x1: 48, x2: width - 8, y1: y.place(t), y2: y.place(t) }),
      svgNode("text", { x: 42, y: y.place(t) + 4, "text-anchor": "end", class: "tick" }, yTexts[i]));
  }
  let free = -Infinity;
  for (const [i, t] of x.ticks.entries()) if (x.place(t) > free) {
    svg.append(svgNode("text", { x: x.place(t), y: height - 24, "text-anchor": "middle", class: "tick" }, xTexts[i]));
    free = x.place(t) + Math.max(44, 7 * xTexts[i].length);
  }
  svg.append(svgNode("text", { x: (48 + width) / 2, y: height - 5, "text-anchor": "middle", class: "name" },
    `${xAxis.name}${xAxis.better === "higher" ? " (higher is better)" : " (lower is better)"}${log ? ", log scale" : ""}`),
  svgNode("text", { x: 4, y: 14, class: "name" }, yAxis.name));
  const sx = xAxis.better === "higher" ? 1 : -1, sy = yAxis.better === "higher" ? 1 : -1;
  const front = points.filter((p) => !points.some((q) => q !== p && sx * q.x >= sx * p.x && sy * q.y.mean >= sy * p.y.mean
    && (q.x !== p.x || q.y.mean !== p.y.mean))).sort((p, q) => p.x - q.x);
  svg.append(svgNode("path", { class: "front", d: "M" + front.map((p) => `${x.place(p.x)},${y.place(p.y.mean)}`).join("L") }));
  const taken = points.map((p) => [x.place(p.x) - 7, y.place(p.y.mean) - 7, 14, 14]);
  for (const p of points) if (p.y.low != null)
    taken.push([x.place(p.x) - 2, y.place(p.y.high), 4, y.place(p.y.low) - y.place(p.y.high)]);
  for (const p of points) {
    const cx = x.place(p.x), cy = y.place(p.y.mean), color = `var(${p.row.color})`;
    const group = svgNode("g", { "data-row": p.index, tabindex: 0 });
    if (p.y.low != null) group.append(svgNode("line", { x1: cx, x2: cx, y1: y.place(p.y.low), y2: y.place(p.y.high),
      style: `stroke:${color};stroke-width:1.5` }));
    group.append(svgNode("path", { d: shapes[p.row.marker], transform: `translate(${cx},${cy})`, style: `fill:${color}` }));
    const label = svgNode("text", { class: "label" }, p.row.short);
    svg.append(group);
    group.append(label);
    const w = label.getComputedTextLength() + 4, h = 15;
    const spots = [-7.5, -21, 6, -35, 20, -49, 34].flatMap((dy) => [[9, dy], [-9 - w, dy], [-w / 2, dy * 1.2]])
      .filter(([dx, dy]) => dx !== -w / 2 || Math.abs(dy) > 9).map(([dx, dy]) => [cx + dx, cy + dy, w, h]);
    const overlap = ([a, b, c, d], [e, f, g, k]) =>
      Math.max(0, Math.min(a + c, e + g) - Math.max(a, e)) * Math.max(0, Math.min(b + d, f + k) - Math.max(b, f));
    const cost = (spot) => taken.reduce((sum, box) => sum + overlap(spot, box), 0)
      + (spot[0] < 46 || spot[0] + w > width || spot[1] < 18 || spot[1] + h > height - 42 ? 4000 : 0)
      + Math.abs(spot[1] + h / 2 - cy);
    const best = spots.reduce((kept, spot) => cost(spot) < cost(kept) ? spot : kept);
    taken.push(best);
    label.setAttribute("x", best[0] + 2);
    label.setAttribute("y", best[1] + 11.5);
    const lines = [[p.row.label, p.row.color, true], [`${yAxis.name}: ${short(p.y.mean)}`
      + (p.y.low != null ? ` [${short(p.y.low)}, ${short(p.y.high)}]` : "")], [`${xAxis.name}: ${short(p.x)}`]];
    group.addEventListener("pointermove", (event) => showTip(event, lines));
    group.addEventListener("pointerleave", hideTip);
  }
}
for (const select of all("#x-axis, #y-axis")) select.addEventListener("change", drawTradeoff);
let waiting = 0;
addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(drawTradeoff); });
drawTradeoff();

// Attention maps of the selected layer and head; rows with fewer heads show their mean.
function showMaps() {
  for (const image of all(".map img")) {
    const layers = page.maps[image.dataset.row], depth = +$("#map-layer").value;
    const layer = layers[Math.round(depth * (layers.length - 1))];
    image.src = layer[+$("#map-head").value] ?? layer[0];
  }
}
for (const select of all("#map-layer, #map-head")) select.addEventListener("change", showMaps);
