// Numbers in words, elements, and charts.
const number = n => n == null ? "?" : Math.round(n).toLocaleString("en");
const plural = (n, one, many) => `${number(n)} ${n === 1 ? one : many || one + "s"}`;
const figure = n => n == null ? "?" : n >= 100 ? number(n) : Number(n.toPrecision(3)).toLocaleString("en");
const short = n => n >= 1e9 ? figure(n / 1e9) + " G" : n >= 1e6 ? figure(n / 1e6) + " M" : n >= 1e4 ? figure(n / 1e3) + " k" : figure(n);
const size = n => { if (n == null) return "?"; let u = 0; while (n >= 1000 && u < 4) { n /= 1000; u++; } return n.toFixed(u ? 1 : 0) + " " + ["B", "KB", "MB", "GB", "TB"][u]; };
const percent = x => (100 * x).toFixed(1) + " %";
const clock = t => new Date(1000 * t).toLocaleString();
const hour = t => new Date(1000 * t).toLocaleTimeString();
const least = list => list.reduce((a, b) => Math.min(a, b), Infinity), most = list => list.reduce((a, b) => Math.max(a, b), -Infinity);
function duration(s) {
  s = Math.max(0, Math.round(s));
  if (s < 100) return `${s} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  const h = Math.floor(s / 3600), m = Math.round(s % 3600 / 60);
  return h < 48 ? `${h} h` + (m ? ` ${m} min` : "") : plural(Math.round(h / 24), "day");
}

// Told apart by most colour-blind people. None is red: that is for rows that were lost or repeated.
const COLOURS = ["#1f82c0", "#e69f00", "#009e73", "#56b4e9", "#7b61b5", "#708090"];
const ON = ["#fff", "#111", "#fff", "#111", "#fff", "#fff"];
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
const colour = k => COLOURS[k % COLOURS.length], on = k => ON[k % ON.length], dash = k => DASHES[k % DASHES.length];

const SVG = "http://www.w3.org/2000/svg";
function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) key.startsWith("on") ? node.addEventListener(key.slice(2), value) : node.setAttribute(key, value);
  node.append(...children.filter(child => child != null));
  return node;
}
function draw(name, attributes, title) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (title) { const t = document.createElementNS(SVG, "title"); t.textContent = title; node.append(t); }
  return node;
}
function label(x, y, text, anchor = "start", fill = "") {
  const node = draw("text", { x, y, "text-anchor": anchor });
  node.textContent = text;
  if (fill) { node.style.fill = fill; node.style.pointerEvents = "none"; }
  return node;
}
const board = (id, width, height) => draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", id });
const wide = () => Math.max(300, Math.min(1200, document.documentElement.clientWidth - 70));
const section = (id, title, ...children) => el("section", { id }, el("h2", {}, title), ...children);
const whole = text => String(text).replaceAll(" %", "\u00a0%");  // no line begins with the sign
const note = text => text ? el("p", { class: "note" }, whole(text)) : null;

function hatched(node, k) {
  // Lines across: what was delivered and then lost in a crash.
  const id = `hatch-${node.id}-${k}`;
  if (!node.querySelector(`#${id}`)) {
    const pattern = draw("pattern", { id, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
    pattern.append(draw("rect", { width: 2.4, height: 5, fill: colour(k) }));
    node.append(pattern);
  }
  return `url(#${id})`;
}
function cross(x, y, title) {
  const node = draw("g", { class: "wrong" }, title);
  node.append(draw("path", { d: `M${x - 4},${y - 4}l8,8m0,-8l-8,8`, stroke: "var(--bad)", "stroke-width": 2.2, fill: "none" }));
  return node;
}
function legend(entries) {
  // [words, kind, colour number or colour, dash]
  return el("div", { class: "legend" }, ...entries.map(([text, kind, k, dashes], i) => {
    const node = draw("svg", { viewBox: "0 0 24 12", id: `legend-${kind}-${i}-${String(text).length}` }), fill = typeof k === "number" ? colour(k) : k;
    if (kind === "line") node.append(draw("line", { x1: 0, x2: 24, y1: 6, y2: 6, stroke: fill, "stroke-width": 3, "stroke-dasharray": dashes || "" }));
    else if (kind === "hatch") node.append(draw("rect", { width: 24, height: 12, fill: hatched(node, k) }));
    else if (kind === "cross") node.append(cross(12, 6));
    else node.append(draw("rect", { width: 24, height: 12, fill, "fill-opacity": kind === "pale" ? .35 : .9 }));
    return el("span", {}, node, whole(text));
  }));
}
function tiles(list) {
  const shown = list.filter(Boolean), most = Math.max(2, Math.floor(wide() / 150)), rows = Math.ceil(shown.length / most);
  const columns = Math.ceil(shown.length / Math.max(1, rows));  // rows of about the same length; a single tile fills its row
  return el("div", { class: "tiles", style: `grid-template-columns: repeat(${columns}, minmax(0, 1fr))` }, ...shown.map(([name, value, kind], i) =>
    el("div", { class: "tile", style: i === shown.length - 1 && i % columns === 0 ? "grid-column: 1 / -1" : "" }, el("b", { class: kind || "" }, value), el("span", { class: "dim" }, name))));
}
function table(id, head, rows, kind = "") {
  // A cell is a text, or [text, class], or an element.
  const cell = (name, value) => el(name, Array.isArray(value) ? { class: value[1] } : {}, Array.isArray(value) ? value[0] : value);
  if (wide() < 500 && head.length > 5)  // a narrow screen: each row is a table of names and values
    return el("div", { id }, ...rows.map(row => el("table", { class: "card" }, ...row.map((value, i) => value === "" ? null : el("tr", {}, cell("th", head[i]), cell("td", value))))));
  return el("div", { class: "scroll" }, el("table", { id, class: kind }, el("tr", {}, ...head.map(text => cell("th", text))),
    ...rows.map(row => el("tr", {}, ...row.map(value => cell("td", value))))));
}
function progressBar(id, share, text) {
  return el("div", { class: "bar", id }, el("i", { style: `width:${(100 * share).toFixed(2)}%` }), el("span", {}, text));
}

function nice(top) {
  // The least round number that is not less.
  if (!(top > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(top)), times = top / power;
  return power * [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find(step => times <= step * 1.0001);
}
function chart(id, lines, options) {
  const width = options.width || wide(), height = options.height || 170, left = 52, top = 8, right = 8, bottom = 22;
  const node = board(id, width, height), all = lines.flatMap(line => line.points);
  if (!all.length) return note(options.nothing || "Nothing recorded yet.");
  const xs = all.map(p => p[0]), ys = all.map(p => p[1]);
  const x0 = least(xs), x1 = most(xs) > x0 ? most(xs) : x0 + 1, low = Math.min(least(ys), options.low ?? 0), high = Math.max(most(ys), options.high ?? 1e-9);
  const y1 = nice(high), y0 = low < 0 ? -nice(-low) : 0;
  const x = v => left + (v - x0) / (x1 - x0) * (width - left - right), y = v => top + (y1 - v) / (y1 - y0) * (height - top - bottom);
  const ticks = (y0 < 0 ? [0, y1, y0] : [0, y1 / 2, y1]).filter(v => v !== y0 || v === 0 || y(y0) - y(0) > 14);
  for (const v of ticks) node.append(draw("line", { x1: left, x2: width - right, y1: y(v), y2: y(v), stroke: "var(--line)" }), label(left - 6, y(v) + 4, options.y(v), "end"));
  node.append(label(left, height - 6, options.x(x0)));
  if (x1 !== x0 && most(xs) > x0) node.append(label(width - right, height - 6, options.x(x1), "end"));
  for (const line of lines) {
    const title = line.name + (line.points.length ? `: ${options.y(line.points[line.points.length - 1][1])} at last` : "");
    if (line.points.length === 1) node.append(draw("circle", { class: "curve", cx: x(line.points[0][0]), cy: y(line.points[0][1]), r: 4, fill: line.colour }, title));
    else if (line.points.length) node.append(draw("polyline", { class: "curve", points: line.points.map(p => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" "),
      fill: "none", stroke: line.colour, "stroke-width": 1.8, "stroke-dasharray": line.dash || "" }, title));
  }
  return node;
}
function picture(id, counts, cells, highest) {
  const node = el("canvas", { id, width: cells, height: cells }), pen = node.getContext("2d"), image = pen.createImageData(cells, cells);
  const ink = getComputedStyle(document.documentElement).getPropertyValue("--one").trim(), rgb = [1, 3, 5].map(k => parseInt(ink.slice(k, k + 2), 16));
  counts.forEach((count, k) => { image.data.set([...rgb, Math.min(255, 255 * Math.sqrt(count / highest))], 4 * k); });
  pen.putImageData(image, 0, 0);
  return node;
}
