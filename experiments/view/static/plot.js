// Charts as SVG. A point is a link to the rollouts behind it; the pointer shows the values at a step.
"use strict";

const svg = (tag, attrs, ...children) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attrs || {})) if (value !== null && value !== undefined) node.setAttribute(key, value);
  node.append(...children);
  return node;
};

/** Return round numbers between two limits. */
function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count, size = 10 ** Math.floor(Math.log10(raw));
  const step = size * ([1, 2, 5, 10].find((m) => m * size >= raw) || 10);
  const found = [];
  const first = Math.ceil(low / step - 1e-9);
  for (let k = 0; k <= 2 * count && (first + k) * step <= high + 1e-9 * step; k++) found.push(Number(((first + k) * step).toPrecision(12)));
  return found;
}

const LEFT = 50, RIGHT = 10, TOP = 8, BOTTOM = 24;

/**
 * Return a figure. series: [{name, colour, dash, x, y, low, high, href(i)}], null in y for no value.
 * options: title, unit (value → text), height, range [low, high], stacked: areas from 0, one above the other,
 * at(step, series): the address that a click or Enter leads to. The arrow keys move along the steps.
 */
function chart(series, { title, unit = short, height = 190, range = null, stacked = false, wide = false, at = null } = {}) {
  series = series.filter((s) => s.y.some((v) => v !== null && v !== undefined));
  if (!series.length) return null;
  if (stacked) series = stack(series);
  const all = (pick) => series.flatMap((s) => pick(s).filter((v) => v !== null && v !== undefined && Number.isFinite(v)));
  const xs = all((s) => s.x), ys = range || all((s) => [...s.y, ...(s.low || []), ...(s.high || [])]);
  let [x0, x1] = extremes(xs), [y0, y1] = extremes(ys);
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  if (y0 === y1) { const d = Math.abs(y0) || 1; y0 -= d / 2; y1 += d / 2; }
  const W = wide ? Math.min(1200, Math.max(400, window.innerWidth - 30)) : 440;
  const X = (x) => LEFT + ((x - x0) / (x1 - x0)) * (W - LEFT - RIGHT);
  const Y = (y) => height - BOTTOM - ((Math.min(Math.max(y, y0), y1) - y0) / (y1 - y0)) * (height - BOTTOM - TOP);
  const canvas = svg("svg", { viewBox: `0 0 ${W} ${height}`, role: at ? "application" : "img", "aria-label": title, tabindex: 0 });
  for (const y of ticks(y0, y1, 4)) {
    canvas.append(svg("line", { class: "grid", x1: LEFT, x2: W - RIGHT, y1: Y(y), y2: Y(y) }));
    canvas.append(svg("text", { x: LEFT - 5, y: Y(y) + 4, "text-anchor": "end" }, unit(y)));
  }
  for (const x of ticks(x0, x1, 6).filter(Number.isInteger)) canvas.append(svg("text", { x: X(x), y: height - 8, "text-anchor": "middle" }, number(x)));
  for (const s of series) draw(canvas, s, X, Y, stacked);
  const cross = svg("line", { class: "cross", y1: TOP, y2: height - BOTTOM, visibility: "hidden" });
  canvas.append(cross);
  const tip = el("div", { class: "tip", hidden: true, role: "status" });
  const legend = el("div", { class: "legend" }, series.map((s) =>
    el("span", null, el("i", { style: { borderTopColor: s.colour, borderTopStyle: s.dash ? "dashed" : "solid" } }), s.name)));
  const figure = el("figure", { class: wide ? "wide" : null }, el("figcaption", null, title), canvas, legend, tip);
  follow(canvas, cross, tip, series, X, Y, unit, at, W, height);
  return figure;
}

function extremes(values) {
  let low = Infinity, high = -Infinity;
  for (const v of values) { if (v < low) low = v; if (v > high) high = v; }
  return [low, high];
}

function stack(series) {
  const base = new Array(series[0].y.length).fill(0);
  return series.map((s) => {
    const low = [...base];
    s.y.forEach((v, i) => { base[i] += v || 0; });
    return { ...s, own: s.y, low, y: [...base], high: [...base] };
  });
}

function draw(canvas, s, X, Y, stacked) {
  const points = s.x.map((x, i) => [x, s.y[i], i]).filter(([, y]) => y !== null && y !== undefined && Number.isFinite(y));
  const path = (list) => list.map(([x, y], k) => `${k ? "L" : "M"}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`).join("");
  if (s.low && s.high) {
    const band = points.filter(([, , i]) => s.low[i] !== null && s.low[i] !== undefined && s.high[i] !== null);
    const outline = [...band.map(([x, , i]) => [x, s.high[i]]), ...band.map(([x, , i]) => [x, s.low[i]]).reverse()];
    if (band.length) canvas.append(svg("path", { d: path(outline) + "Z", fill: s.colour, "fill-opacity": stacked ? 0.75 : 0.14 }));
  }
  if (!stacked) {
    canvas.append(svg("path", { d: path(points), fill: "none", stroke: s.colour, "stroke-width": s.thin ? 1 : 1.8, "stroke-dasharray": s.dash ? "5 4" : null, "stroke-linejoin": "round" }));
  }
  if (s.href && points.length <= 60) {
    for (const [x, y, i] of points) {
      const dot = svg("circle", { cx: X(x), cy: Y(y), r: stacked ? 2 : 3.2, fill: s.colour });
      dot.append(svg("title", null, `${s.name}, step ${x}: see the rollouts`));
      canvas.append(svg("a", { href: s.href(i) }, dot));
    }
  }
}

function follow(canvas, cross, tip, series, X, Y, unit, at, W, height) {
  const given = (v) => v !== null && v !== undefined && Number.isFinite(v);
  const steps = [...new Set(series.flatMap((s) => s.x.filter((_, i) => given(s.y[i]))))].sort((a, b) => a - b);
  let best = null, near = series[0];
  const value = (s) => { const i = s.x.indexOf(best); return i < 0 ? null : s.y[i] ?? null; };
  const leave = () => { tip.hidden = true; cross.setAttribute("visibility", "hidden"); best = null; };
  const show = (step) => {
    best = step;
    const lines = series.filter((s) => value(s) !== null);
    if (!lines.length) return leave();
    cross.setAttribute("x1", X(best));
    cross.setAttribute("x2", X(best));
    cross.setAttribute("visibility", "visible");
    tip.replaceChildren(el("b", null, `step ${number(best)}`), ...lines.map((s) => {
      const i = s.x.indexOf(best), banded = !s.own && s.low && s.low[i] !== null && s.low[i] !== undefined;
      const between = banded ? ` [${unit(s.low[i])}, ${unit(s.high[i])}]` : "";
      return el("div", { style: { color: s.colour } }, `${s.name} ${unit(s.own ? s.own[i] : s.y[i])}${between}`);
    }), ...(at ? [el("div", { class: "soft" }, "click or Enter: the rollouts")] : []));
    tip.hidden = false;
    const box = canvas.getBoundingClientRect(), x = (X(best) * box.width) / W, right = x > box.width / 2;
    const sides = right ? { left: "", right: `${box.width - x + 10}px` } : { left: `${x + 10}px`, right: "" };
    Object.assign(tip.style, { top: `${canvas.offsetTop + 6}px`, ...sides });
  };
  canvas.addEventListener("pointerleave", leave);
  canvas.addEventListener("blur", leave);
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect(), place = ((event.clientX - box.left) * W) / box.width;
    show(steps.reduce((a, b) => (Math.abs(X(b) - place) < Math.abs(X(a) - place) ? b : a)));
    const level = ((event.clientY - box.top) * height) / box.height;
    const away = (s) => (best === null || value(s) === null ? Infinity : Math.abs(Y(value(s)) - level));
    near = series.reduce((a, b) => (away(b) < away(a) ? b : a));
  });
  const open = () => { if (at && best !== null) location.hash = at(best, near); };
  canvas.addEventListener("keydown", (event) => {
    const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (way) {
      const to = best === null ? (way > 0 ? 0 : steps.length - 1) : steps.indexOf(best) + way;
      if (steps[to] !== undefined) show(steps[to]);
    } else if (event.key !== "Enter" || event.target !== canvas) return;
    else open();
    event.preventDefault();
    event.stopPropagation(); // on other places the arrows move between rollouts
  });
  if (!at) return;
  canvas.style.cursor = "pointer";
  canvas.addEventListener("click", (event) => { if (!event.target.closest("a")) open(); });
}
