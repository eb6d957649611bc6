// The explorer: the weights of one query over the picture, by layer and head, for one model or two.
const DATA = JSON.parse($("#data").textContent);
const at = {picture: 0, layer: 0, head: "mean", view: "", reverse: false, token: -1, y: 0.5, x: 0.5, frame: 0};  // frame: 0 = all of a clip, side by side
const picture = () => DATA.pictures[at.picture];
const layersOf = (model) => picture().models[model].layers;
const layerOf = (model) => layersOf(model)[Math.min(at.layer, layersOf(model).length - 1)];

function bytes(text) {
  const raw = atob(text), out = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
  return out;
}
function decoded(layer) {  // at its first use
  if (typeof layer.codes === "string") {
    layer.codes = bytes(layer.codes);
    layer.scales = new Float32Array(bytes(layer.scales).buffer);
    layer.tokens = layer.prefix + layer.rows * layer.columns + layer.suffix;
    for (const view of layer.views) {
      view.values = bytes(view.values);
      for (const [name, type] of [["scales", Float32Array], ["of", Int32Array]]) if (view[name]) view[name] = new type(bytes(view[name]).buffer);
    }
    if (layer.points) {
      layer.points.places = new Int16Array(bytes(layer.points.places).buffer);
      if (layer.points.shares) layer.points.shares = bytes(layer.points.shares);
    }
    if (layer.places) {  // in windows: the slot of each cell among the tokens of all windows
      layer.cells = layer.places.flat();
      layer.slots = new Int32Array(layer.tokens);
      layer.cells.forEach((cell, slot) => { layer.slots[cell] = slot; });
    }
  }
  return layer;
}
// The weights of a query on all tokens, or in the reverse direction those of all tokens on it. head: a number or "mean".
function weights(layer, head, query, reverse) {
  const {codes, scales, tokens, zero, levels, heads, places, slots, cells} = decoded(layer), out = new Float32Array(tokens);
  const width = places ? places[0].length : tokens, slot = places ? slots[query] : query, first = places ? slot - slot % width : 0;
  for (const h of head === "mean" ? [...Array(heads).keys()] : [head]) for (let other = 0; other < width; other++) {
    const row = h * tokens + (reverse ? first + other : slot), column = reverse ? slot - first : other;
    out[places ? cells[first + other] : other] += (codes[row * width + column] - zero) * scales[row] / levels / (head === "mean" ? heads : 1);
  }
  return out;
}
// The same of a view: a set counts 1 for its tokens.
function viewed(layer, view, head, query, reverse) {
  const {tokens, heads} = decoded(layer), out = new Float32Array(tokens), wide = Math.ceil(tokens / 8);
  for (const h of head === "mean" ? [...Array(heads).keys()] : [head]) for (let other = 0; other < tokens; other++) {
    const from = reverse ? other : query, to = reverse ? query : other, row = h * view.rows + (view.of ? view.of[h * tokens + from] : from);
    const value = view.set ? view.values[row * wide + (to >> 3)] >> (7 - (to & 7)) & 1 : (view.values[row * tokens + to] - view.zero) * view.scales[row] / view.levels;
    out[other] += value / (head === "mean" ? heads : 1);
  }
  return out;
}
// Where a query samples: [y, x, share of its largest] of each point, y and x in cells from the centre of the first one.
function samples(layer, head, query) {
  const {places, shares, count, parts} = decoded(layer).points, out = [], rows = shares ? layer.tokens : 1;
  for (const h of head === "mean" ? [...Array(layer.heads).keys()] : [head]) for (let i = 0; i < count; i++) {
    const row = h * rows + (shares ? query : 0), share = shares ? shares[row * count + i] / 255 : 1, at = 2 * (row * count + i);
    if (share > 0) out.push([places[at] / parts, places[at + 1] / parts, share]);
  }
  return out;
}
const viewOf = (layer) => layer.views.find((view) => view.name === at.view);
const shown = (layer, head, query, reverse) => viewOf(layer) ? viewed(layer, viewOf(layer), head, query, reverse) : weights(layer, head, query, reverse);
const cell = (layer) => [Math.min(layer.rows - 1, Math.floor(at.y * layer.rows)), Math.min(layer.columns - 1, Math.floor(at.x * layer.columns))];
function queryOf(layer) {
  const further = layer.prefix + layer.suffix;
  if (at.token >= 0 && at.token < further) return at.token < layer.prefix ? at.token : at.token + layer.rows * layer.columns;
  const [y, x] = cell(layer);
  return layer.prefix + y * layer.columns + x;
}
const inside = (layer, values) => values.subarray(layer.prefix, layer.prefix + layer.rows * layer.columns);
const headOf = (layer) => at.head === "mean" || at.head === "all" ? "mean" : Math.min(at.head, layer.heads - 1);
const sameShape = (a, b) => a.rows === b.rows && a.columns === b.columns && a.heads === b.heads;

function paint(canvas, layer, values) {  // amber for positive, blue for negative; opacity is the share of the largest
  canvas.width = layer.columns; canvas.height = layer.rows;
  const context = canvas.getContext("2d"), image = context.createImageData(layer.columns, layer.rows);
  let largest = 1e-12;
  for (const value of values) largest = Math.max(largest, Math.abs(value));
  values.forEach((value, i) => {
    image.data.set(value >= 0 ? [255, 176, 0] : [86, 180, 255], 4 * i);
    image.data[4 * i + 3] = Math.round(235 * Math.abs(value) / largest);
  });
  context.putImageData(image, 0, 0);
}
function mapElement(label) {
  const figure = document.createElement("figure"), map = document.createElement("div");
  map.className = "map";
  map.innerHTML = '<div class="strip"><div class="photo under"></div><canvas></canvas><svg aria-hidden="true"></svg><div class="query"></div></div>';
  $(".photo", map).style.backgroundImage = `url(${picture().image})`;
  const caption = document.createElement("figcaption");
  caption.textContent = label;
  figure.append(map, caption);
  return figure;
}
function dot(map, layer, head) {
  const svg = $("svg", map), {width, height} = picture(), found = layer.points && !at.reverse && !viewOf(layer) ? samples(layer, head, queryOf(layer)) : [];
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.innerHTML = found.map(([y, x, share]) => `<circle cx="${(x + 0.5) / layer.columns * width}" cy="${(y + 0.5) / layer.rows * height}" r="${width / 120}" opacity="${0.25 + 0.75 * share}"/>`).join("");
}
function markQuery(map, layer) {
  const mark = $(".query", map), [y, x] = cell(layer);
  mark.hidden = at.token >= 0;
  Object.assign(mark.style, {left: `${100 * x / layer.columns}%`, top: `${100 * y / layer.rows}%`, width: `${100 / layer.columns}%`, height: `${100 / layer.rows}%`});
  map.style.setProperty("--cell-x", `${100 / layer.columns}%`);
  map.style.setProperty("--cell-y", `${100 / layer.rows}%`);
  map.classList.toggle("grid", $("#grid").checked);
  const frames = at.frame ? layer.frames : 1;
  for (const [name, value] of [["--shape", `${picture().width / frames}/${picture().height}`], ["--frames", frames], ["--frame", Math.max(0, at.frame - 1)]]) map.style.setProperty(name, value);
}
const wordsOf = (layer, y, x) => {
  const width = layer.columns / layer.frames;  // of a frame
  return `${layer.frames > 1 ? `frame ${Math.floor(x / width)}, ` : ""}row ${y}, column ${x % width}`;
};
const percent = (value) => `${(100 * value).toFixed(Math.abs(value) < 0.1 ? 2 : 1)} %`;
function sentence(model, layer, values) {
  const patches = inside(layer, values);
  let best = 0;
  patches.forEach((value, i) => { if (value > patches[best]) best = i; });
  let other = 0;
  values.forEach((value, i) => { if (i < layer.prefix || i >= layer.prefix + patches.length) other += value; });
  const [y, x] = cell(layer), from = at.token >= 0 ? $("#token").selectedOptions[0].textContent : wordsOf(layer, y, x);
  const start = `${picture().models.length > 1 ? `${picture().models[model].label}: ` : ""}${layer.name}, ${headOf(layer) === "mean" ? "mean of heads" : `head ${headOf(layer)}`}: ${from}`;
  const view = viewOf(layer);
  if (view) {
    const number = values.reduce((sum, value) => sum + value, 0), kind = headOf(layer) === "mean" ? " in the mean of heads" : "";
    const about = view.set ? `${Number(number.toFixed(1))} tokens${kind}` : `most at ${wordsOf(layer, Math.floor(best / layer.columns), best % layer.columns)}`;
    return `${start}, ${at.reverse ? `queries that have it in "${view.name}"` : view.name}: ${about}.`;
  }
  const place = `${wordsOf(layer, Math.floor(best / layer.columns), best % layer.columns)} (${percent(patches[best])})`;
  const verb = at.reverse ? `is looked at most from ${place}` : `looks most at ${place}${layer.prefix + layer.suffix ? `; ${percent(other)} on other tokens` : ""}`;
  return `${start} ${verb}.`;
}

function draw() {
  const models = picture().models.map((_, i) => i), found = models.map((i) => {
    const layer = decoded(layerOf(i));
    return [layer, shown(layer, headOf(layer), queryOf(layer), at.reverse)];
  });
  const figures = all("#models>figure");
  found.forEach(([layer, values], i) => {
    paint($("canvas", figures[i]), layer, inside(layer, values));
    dot(figures[i], layer, headOf(layer));
    markQuery($(".map", figures[i]), layer);
    $("figcaption", figures[i]).textContent = picture().models[i].label + (viewOf(layer) ? `: ${at.view}` : "");
    drawHeads(figures[i], layer);
  });
  const lines = found.map(([layer, values], i) => sentence(i, layer, values));
  if (models.length > 1) {
    const [[a, old], [b, now]] = found, difference = figures[2];
    difference.hidden = !sameShape(a, b) || Boolean(viewOf(a) || viewOf(b));
    if (!difference.hidden) {
      const change = now.map((value, i) => value - old[i]);
      paint($("canvas", difference), a, inside(a, change));
      markQuery($(".map", difference), a);
      const moved = change.reduce((sum, value) => sum + Math.abs(value), 0) / 2;
      lines.push(`Of this query's weight ${percent(moved)} lies elsewhere in the second model.`);
    }
    if (picture().change) lines.push(picture().change);
  }
  $("#readout").textContent = lines.join(" ");
  $("#models").classList.toggle("wide", !at.frame && picture().width > 3 * picture().height);
  $("#frame").value = at.frame;
  $("#frame-name").textContent = at.frame ? at.frame - 1 : "all";
  $("#layer").value = at.layer;
  $("#layer-name").textContent = layerOf(0).name;
  $("#layer").setAttribute("aria-valuetext", layerOf(0).name);
  $("#head").value = String(at.head);
  $("#direction").value = at.reverse ? "to" : "from";
  for (const point of all("#plots circle")) point.classList.toggle("on", Number(point.dataset.layer) === at.layer && (at.head === "mean" || at.head === "all" || Number(point.dataset.head) === at.head));
}
function drawHeads(figure, layer) {  // small multiples
  let box = $(".heads", figure);
  if (at.head !== "all") { if (box) box.remove(); return; }
  if (!box || box.children.length !== layer.heads) {
    if (box) box.remove();
    box = document.createElement("div");
    box.className = "heads";
    for (let head = 0; head < layer.heads; head++) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...mapElement(`head ${head}`).childNodes);
      button.addEventListener("click", () => { at.head = head; draw(); });
      box.append(button);
    }
    figure.append(box);
  }
  [...box.children].forEach((button, head) => {
    paint($("canvas", button), layer, inside(layer, shown(layer, head, queryOf(layer), at.reverse)));
    dot(button, layer, head);
    markQuery($(".map", button), layer);
  });
}

function plot(key, title) {  // a point for each head, layers from left to right
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), make = (name, attributes, text) => {
    const node = document.createElementNS(svg.namespaceURI, name);
    for (const [attribute, value] of Object.entries(attributes)) node.setAttribute(attribute, value);
    if (text !== undefined) node.textContent = text;
    svg.append(node);
    return node;
  };
  const width = 360, height = 170, left = 38, bottom = 146, top = 24;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", title);
  const values = picture().models.flatMap((model) => model.layers.flatMap((layer) => layer[key]));
  const most = Math.max(1e-9, ...values), count = Math.max(...picture().models.map((model) => model.layers.length));
  make("text", {x: left, y: 12}, title);
  for (const share of [0, 0.5, 1]) {
    const y = bottom - share * (bottom - top);
    make("line", {x1: left, x2: width - 4, y1: y, y2: y});
    make("text", {x: left - 4, y: y + 4, "text-anchor": "end"}, key === "extra" ? `${Math.round(100 * share * most)} %` : (share * most).toPrecision(2));
  }
  make("text", {x: width - 4, y: height - 6, "text-anchor": "end"}, "layer");
  picture().models.forEach((model, m) => model.layers.forEach((layer, number) => layer[key].forEach((value, head) => {
    const x = left + 8 + (width - left - 20) * (count > 1 ? number / (count - 1) : 0.5) + 5 * m;
    const point = make("circle", {cx: x, cy: bottom - value / most * (bottom - top), r: 4, class: m ? "other" : "", "data-layer": number, "data-head": head});
    const name = document.createElementNS(svg.namespaceURI, "title");
    name.textContent = `${model.label}, ${layer.name}, head ${head}: ${value}`;
    point.append(name);
    point.addEventListener("click", () => { at.layer = number; at.head = layer.heads > 1 ? head : "mean"; draw(); });
  })));
  return svg;
}

function fill(select, entries) {
  select.replaceChildren(...entries.map(([value, text]) => new Option(text, value)));
}
function point(event, map) {
  const box = map.getBoundingClientRect(), clamp = (value) => Math.min(0.9999, Math.max(0, value));
  at.x = clamp((event.clientX - box.left) / box.width);
  if (at.frame) at.x = (at.frame - 1 + at.x) / layersOf(0)[0].frames;
  at.y = clamp((event.clientY - box.top) / box.height);
  at.token = -1;
  $("#token").value = "-1";
  draw();
}
function build() {
  const names = picture().models.map((model) => model.label), models = $("#models");
  if (names.length > 1) names.push("second minus first: amber more, blue less");
  models.replaceChildren(...names.map(mapElement));
  models.classList.toggle("one", names.length === 1);
  for (const map of all(".map", models)) {
    map.addEventListener("pointerdown", (event) => { map.setPointerCapture(event.pointerId); point(event, map); });
    map.addEventListener("pointermove", (event) => { if (event.pointerType === "mouse" || event.buttons) point(event, map); });
  }
  const first = layersOf(0), further = first[0].prefix + first[0].suffix;
  $("#frame").max = first[0].frames;
  $("#frame-label").hidden = first[0].frames < 2;
  at.frame = Math.min(at.frame, first[0].frames > 1 ? first[0].frames : 0);
  $("#layer").max = Math.max(...picture().models.map((model) => model.layers.length)) - 1;
  fill($("#head"), [["mean", "mean"], ["all", "all"], ...Array.from({length: Math.max(...first.map((layer) => layer.heads))}, (_, head) => [head, head])]);
  fill($("#token"), [[-1, "the patch"], ...Array.from({length: further}, (_, token) => [token, token === 0 && first[0].prefix ? "class token (0)" : `token ${token}`])]);
  $("#token").closest("label").hidden = !further;
  const views = [...new Set(picture().models.flatMap((model) => model.layers.flatMap((layer) => layer.views.map((view) => view.name))))];
  if (!views.includes(at.view)) at.view = "";
  fill($("#view"), [["", "weights"], ...views.map((name) => [name, name])]);
  $("#view").value = at.view;
  $("#view-label").hidden = !views.length;
  $("#plots").replaceChildren(plot("entropy", "Entropy"), plot("distance", "Distance"), plot("extra", "Other tokens"));
  draw();
}
function step(dy, dx) {
  const layer = layerOf(0), [y, x] = cell(layer);
  at.y = (Math.min(layer.rows - 1, Math.max(0, y + dy)) + 0.5) / layer.rows;
  at.x = (Math.min(layer.columns - 1, Math.max(0, x + dx)) + 0.5) / layer.columns;
  at.token = -1;
  $("#token").value = "-1";
  if (at.frame) at.frame = 1 + Math.floor(at.x * layer.frames);
}
const KEYS = {
  ArrowUp: () => step(-1, 0), ArrowDown: () => step(1, 0), ArrowLeft: () => step(0, -1), ArrowRight: () => step(0, 1),
  m: () => { at.head = "mean"; }, a: () => { at.head = "all"; }, r: () => { at.reverse = !at.reverse; },
  f: () => { at.frame = (at.frame + 1) % (layerOf(0).frames > 1 ? layerOf(0).frames + 1 : 1); },
  "+": () => { at.layer = Math.min(Number($("#layer").max), at.layer + 1); }, "-": () => { at.layer = Math.max(0, at.layer - 1); },
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /SELECT|INPUT/.test(event.target.tagName)) return;
  if (/^[0-9]$/.test(event.key)) at.head = Math.min(Number(event.key), layerOf(0).heads - 1);
  else if (KEYS[event.key]) KEYS[event.key]();
  else return;
  event.preventDefault();
  draw();
});
$("#picture-label").hidden = DATA.pictures.length < 2;
fill($("#picture"), DATA.pictures.map((one, i) => [i, one.name]));
const choose = {
  picture: (value) => { at.picture = Number(value); build(); }, layer: (value) => { at.layer = Number(value); },
  head: (value) => { at.head = /^\d+$/.test(value) ? Number(value) : value; }, direction: (value) => { at.reverse = value === "to"; },
  frame: (value) => { at.frame = Number(value); }, token: (value) => { at.token = Number(value); }, view: (value) => { at.view = value; }, grid: () => {},
};
for (const [name, change] of Object.entries(choose)) $(`#${name}`).addEventListener("input", (event) => { change(event.target.value); draw(); });
at.layer = Math.max(0, layersOf(0).filter((layer) => !layer.name.startsWith("rollout")).length - 1);
build();
