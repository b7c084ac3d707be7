// Elements, text and data. Data never becomes markup: every text becomes a text node or an attribute.
"use strict";

/**
 * Return an element. attrs: properties on* and class, others as attributes; false and null are left out. In texts among
 * the children, control characters and direction marks are written out.
 */
function el(tag, attrs, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attrs || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(node.style, value);
    else node.setAttribute(key === "class" ? "class" : key, value === true ? "" : value);
  }
  const given = children.flat(3).filter((child) => child !== null && child !== undefined && child !== false);
  node.append(...given.flatMap((child) => (typeof child === "string" ? visible(child) : [child])));
  return node;
}

/** Return a link inside the view: only addresses of the form #/page?... are made. */
function link(page, params, ...children) {
  return el("a", { href: address(page, params) }, ...children);
}

function address(page, params) {
  const kept = Object.entries(params || {}).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return `#/${page}` + (kept.length ? "?" + new URLSearchParams(kept) : "");
}

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]/gu;

/** Return nodes for text in which control characters and direction marks are written out. */
function visible(text) {
  if (text.search(HIDDEN) < 0) return [text];
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(HIDDEN)) {
    const code = match[0].codePointAt(0);
    if (match.index > end) nodes.push(text.slice(end, match.index));
    nodes.push(el("span", { class: "hidden-char" }, "\\u" + code.toString(16).padStart(4, "0")));
    end = match.index + match[0].length;
  }
  nodes.push(text.slice(end));
  return nodes;
}

/** Return a block of text of a model or a world. Beyond `limit` characters it is shown piece by piece, on request. */
function block(text, limit = 2000) {
  text = typeof text === "string" ? text : JSON.stringify(text) ?? "";
  const box = el("div", { class: "text", dir: "auto" });
  let shown = 0;
  const more = el("button", { type: "button", onclick: () => grow(50000) });
  const grow = (count) => {
    const end = Math.min(text.length, shown + count);
    more.remove();
    box.append(...visible(text.slice(shown, end)));
    shown = end;
    if (shown < text.length) {
      more.textContent = `show more of ${number(text.length - shown)} characters`;
      box.append(" ", more);
    }
  };
  grow(limit);
  return box;
}

/** Return the first characters of a text in one line. */
function brief(text, limit = 160) {
  const line = String(text ?? "").slice(0, 4 * limit).replace(/\s+/g, " ");
  return visible(line.length > limit ? line.slice(0, limit) + " …" : line);
}

const number = (value) => value.toLocaleString("en-US");
const percent = (value) => (value === null || value === undefined || Number.isNaN(value) ? "–" : (100 * value).toFixed(1));

/** Return a number in at most four significant digits. A text, as of whole numbers above 2^53, stays as it is. */
function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isSafeInteger(value)) return number(value);
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

function clock(seconds) {
  const whole = Math.round(seconds), pad = (x) => String(x).padStart(2, "0");
  const hours = Math.floor(whole / 3600);
  return (hours ? `${hours}:${pad(Math.floor(whole / 60) % 60)}` : `${Math.floor(whole / 60)}`) + `:${pad(whole % 60)}`;
}

/** Return a table. columns: [{name, cell(row), n: numeric, sort(row), t: text}]; sorted by a click on a heading. */
function table(columns, rows, { page = 50, sort = null, down = true } = {}) {
  let by = sort, falling = down, count = page, ordered = rows;
  const body = el("tbody"), heads = el("tr"), foot = el("p");
  const draw = () => {
    if (by !== null) {
      const missing = (v) => v === null || v === undefined || Number.isNaN(v), way = falling ? -1 : 1;
      const keys = rows.map(columns[by].sort), last = new Set([...rows.keys()].filter((i) => missing(keys[i])));
      const order = [...rows.keys()].filter((i) => !last.has(i)).sort((i, j) => (keys[i] < keys[j] ? -way : keys[i] > keys[j] ? way : 0));
      ordered = [...order, ...last].map((i) => rows[i]);
    }
    heads.replaceChildren(...columns.map((column, i) => {
      const mark = by === i ? (falling ? " ▾" : " ▴") : "";
      const title = column.sort
        ? el("button", { type: "button", onclick: () => { falling = by === i ? !falling : true; by = i; draw(); } }, column.name + mark)
        : column.name;
      return el("th", { class: column.n ? "n" : null, scope: "col", "aria-sort": by === i ? (falling ? "descending" : "ascending") : null }, title);
    }));
    body.replaceChildren(...ordered.slice(0, count).map((row) =>
      el("tr", null, columns.map((c) => el("td", { class: c.n ? "n" : c.t ? "t" : null }, c.cell(row))))));
    foot.replaceChildren(...(ordered.length > count
      ? [`${number(count)} of ${number(ordered.length)} `, el("button", { type: "button", onclick: () => { count += 5 * page; draw(); } }, "show more")]
      : []));
  };
  draw();
  return el("div", null, el("div", { class: "scroll" }, el("table", null, el("thead", null, heads), body)), foot);
}

// --- data ------------------------------------------------------------------------------------------------------------

const waiting = new Map(), kept = new Map();

/** Called by the scripts of a bundle: hands over a resource, gzipped JSON in base64. */
function deliver(name, packed) {
  const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  new Response(stream).json().then((value) => waiting.get(name)?.(value));
}

/** Return a resource: from the server, or in a bundle from its script. */
async function get(name, query = "") {
  if (!window.BUNDLE) {
    const answer = await fetch(`api/${name}${query}`);
    if (!answer.ok) throw new Error(`${name}: ${await answer.text()}`);
    return answer.json();
  }
  return new Promise((resolve, reject) => {
    const script = el("script", { src: `data/${name.replaceAll("/", "-")}.js` });
    const done = () => { waiting.delete(name); script.remove(); };
    waiting.set(name, (value) => { done(); resolve(value); });
    script.onerror = () => { done(); reject(new Error(`${name} is not part of this bundle`)); };
    document.head.append(script);
  });
}

/** Return a resource of which the last `most` are kept. */
async function once(name, most = 40) {
  if (!kept.has(name)) {
    kept.set(name, get(name));
    if (kept.size > most) kept.delete(kept.keys().next().value);
  }
  try {
    return await kept.get(name);
  } catch (error) {
    kept.delete(name);
    throw error;
  }
}

/** A run: its overview, and the index of its rollouts as columns, one value per rollout. */
class Run {
  constructor(place, name) {
    Object.assign(this, { place, name, overview: null, generation: -1, fresh: false });
    this.clear();
  }

  clear() {
    this.files = []; // by number; those from `first` to `end`, without `end`, are here
    this.first = this.end = 0;
    this.rows = { file: [], row: [], step: [], kind: [], world: [] };
    this.queries = {};
    this.count = 0;
    this.broken = 0;
    this.faults = [];
    this.pending = 0;
  }

  async load() {
    this.overview = await get(`run/${this.place}/overview`);
    const metrics = this.overview.metrics;
    for (const [name, values] of Object.entries(metrics)) metrics[name] = values.map((v) => (typeof v === "string" ? Number(v) : v));
    return this.overview;
  }

  /** Fetch a part of the index: what is new, then what is older, the newest first. Return whether there may be more. */
  async loadPart() {
    const { first, end, generation } = this;
    if (this.fresh) return false;
    const found = await get(`run/${this.place}/index`, `?first=${first}&end=${end}&generation=${generation}`);
    if (this.first !== first || this.end !== end || this.generation !== generation) return this.pending > 0; // another call was faster
    if (found.generation !== generation) {
      if (this.count) { this.clear(); kept.clear(); }
      this.first = this.end = found.first + found.files.length;
    }
    this.generation = found.generation;
    found.files.forEach((file, i) => this.add(file, found.first + i));
    this.first = Math.min(this.first, found.first);
    this.end = Math.max(this.end, found.first + found.files.length);
    this.pending = found.pending;
    this.fresh = this.pending === 0; // until the look for news finds some
    return this.pending > 0 && found.files.length > 0;
  }

  /** Fetch all that is new of the index. */
  async loadRows() {
    while (await this.loadPart());
  }

  /** Fetch what is new of the index, and what is older until file number `wanted` is here. */
  async loadFile(wanted) {
    while (await this.loadPart() && !this.files[wanted]);
  }

  add(file, number) {
    const rows = this.rows;
    for (const [name, values] of Object.entries(file.columns)) {
      const column = (rows[name] ??= new Array(this.count).fill(null));
      for (let i = 0; i < file.count; i++) column.push(values[i]);
    }
    for (let i = 0; i < file.count; i++) {
      rows.file.push(number);
      rows.row.push(i);
      rows.step.push(file.step);
      rows.kind.push(file.kind);
    }
    this.count += file.count;
    while (rows.world.length < this.count) rows.world.push(null); // of files without this column
    this.broken += file.broken || 0;
    this.faults.push(...(file.faults || []).map((fault) => `${file.name}: ${fault}`));
    Object.assign(this.queries, file.queries);
    this.files[number] = { name: file.name, kind: file.kind, step: file.step, count: file.count, members: file.members.map(([, , rows]) => rows) };
  }

  /** Return {record, pieces, without_pieces} of row number `i`. */
  async record(i) {
    const file = this.files[this.rows.file[i]];
    let place = this.rows.row[i], member = 0;
    while (place >= file.members[member]) place -= file.members[member++];
    const chunk = await once(`run/${this.place}/rollouts/${this.rows.file[i]}/${member}`);
    return { record: chunk.records[place], pieces: chunk.pieces, without_pieces: chunk.without_pieces };
  }

  /** Return the values of a metric by line of metrics.jsonl. */
  metric(name) { return this.overview.metrics[name] || []; }

  get steps() { return this.metric("step"); }
}

const view = { runs: [] };

/** Return the run that the address names. */
const chosen = (params) => view.runs[Math.min(Number(params.run) || 0, view.runs.length - 1)];

/** Return a choice among the runs, nothing if there is one. */
function runChoice(page, params) {
  if (view.runs.length < 2) return null;
  const choose = (event) => { location.hash = address(page, { run: event.target.value }); };
  return el("label", null, "run ", el("select", { onchange: choose, "aria-label": "run" },
    view.runs.map((run, i) => el("option", { value: i, selected: i === chosen(params).place }, run.name))));
}
