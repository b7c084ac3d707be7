// Rollouts: filters, a table, a table of groups, one group side by side, one rollout token by token.
"use strict";

const WORDS = { success: { 1: "success", 0: "failure" }, guided: { 1: "guided", 0: "unguided" } };
const CHOICES = ["kind", "world", "origin", "difficulty", "success", "stop", "fate", "guided", "label"];

/** Return what a filter compares with: (rows, i) → a value, as text. */
const KEYS = {
  kind: (r, i) => r.kind[i],
  draw: (r, i) => r.draw[i],
  file: (r, i) => r.file[i],
  world: (r, i) => r.world[i],
  origin: (r, i) => r.origin[i],
  difficulty: (r, i) => r.difficulty[i],
  success: (r, i) => (r.success[i] ? 1 : 0),
  stop: (r, i) => r.stop[i],
  fate: (r, i) => r.fate[i],
  guided: (r, i) => (r.experience[i].length ? 1 : 0),
};

const TESTS = {
  experience: (r, i, id) => r.experience[i].includes(id),
  reason: (r, i, reason) => r.abstained[i].includes(reason),
  broken: (r, i) => ["env_error", "env_timeout", "cancelled"].includes(r.stop[i]),
  label: (r, i, name) => ({ good: r.good[i] > 0, bad: r.bad[i] > 0, none: !r.good[i] && !r.bad[i], abstained: r.abstained[i].length > 0 })[name],
  agrees: (r, i) => r.verified[i] !== null && r.judged[i] !== null && (r.judged[i] > 0.5) === (r.verified[i] > 0.5),
  differs: (r, i) => r.verified[i] !== null && (r.judged[i] > 0.5) !== (r.verified[i] > 0.5),
  judged: (r, i) => r.judged[i] !== null,
  checked: (r, i) => r.judged[i] !== null && r.verified[i] !== null,
  labelled: (r, i) => r.good[i] > 0 || r.bad[i] > 0 || r.abstained[i].length > 0,
};

/** Return a test of the step for "12" or "3-9". */
function stepTest(text) {
  const [low, high] = String(text).split("-").map((part) => (part.trim() === "" ? null : Number(part)));
  return high === undefined ? (step) => step === low : (step) => step !== null && step >= (low ?? -1) && step <= (high ?? Infinity);
}

/** Return true for a rollout that could train: one of a step, or a further one of its recipe. */
const ofTraining = (r, i) => r.kind[i] === "step" || r.kind[i] === "extra";

/** Return "sampled" or "greedy" for a held-out rollout: the two are groups of their own. */
const decoding = (r, i) => (ofTraining(r, i) ? "" : r.fate[i]);
const groupKey = (r, i) => `${r.file[i]}|${r.draw[i]}|${r.task[i]}|${decoding(r, i)}`;

/** Return the keys of the groups in which an experience was shown. */
function groupsWith(run, id) {
  const r = run.rows, groups = new Set();
  for (let i = 0; i < run.count; i++) if (r.kind[i] === "step" && r.experience[i].includes(id)) groups.add(groupKey(r, i));
  return groups;
}

/** Tests that need to look at the whole run first: (run, value) → (i) → whether the row passes. */
const WIDE = {
  task: (run, text) => { // an id, or part of an id or of a query
    if (run.queries[text] !== undefined) return (i) => run.rows.task[i] === text;
    const part = text.toLowerCase(), known = new Set(Object.entries(run.queries).filter(([id, query]) => `${id}\n${query}`.toLowerCase().includes(part)).map(([id]) => id));
    return (i) => known.has(run.rows.task[i]);
  },
  beside: (run, id) => { // the unguided rollouts of the groups in which an experience was shown
    const groups = groupsWith(run, id);
    return (i) => !run.rows.experience[i].length && groups.has(groupKey(run.rows, i));
  },
  compared: (run, id) => { // those, and the ones that it was shown in
    const groups = groupsWith(run, id), r = run.rows;
    return (i) => groups.has(groupKey(r, i)) && (!r.experience[i].length || r.experience[i].includes(id));
  },
  replayed: (run, pair) => { // "1,-1": those with a turn that the judge labelled GOOD and replay BAD; "any": all
    const cells = (run.overview.replayed[0]?.table || []).filter((c) => pair === "any" || pair === `${c.judge},${c.replay}`);
    const places = new Set(cells.flatMap((c) => c.rollouts.map(([file, row]) => `${file}|${row}`)));
    return (i) => places.has(`${run.files[run.rows.file[i]].name}|${run.rows.row[i]}`);
  },
};
const EXTRA = ["experience", "beside", "compared", "reason", "broken", "agrees", "differs", "judged", "checked", "labelled", "replayed", "draw", "file"];

/** Return the numbers of the rows that pass the filters of an address; found: {file: Set of rows} of a text search. */
function select(run, params, found = null) {
  const rows = run.rows, tests = [];
  if (params.step !== undefined && params.step !== "") { const test = stepTest(params.step); tests.push((i) => test(rows.step[i])); }
  for (const [name, key] of Object.entries(KEYS)) {
    if (params[name] !== undefined && params[name] !== "") tests.push((i) => String(key(rows, i)) === params[name]);
  }
  for (const [name, test] of Object.entries(TESTS)) if (params[name]) tests.push((i) => test(rows, i, params[name]));
  for (const [name, prepare] of Object.entries(WIDE)) if (params[name]) tests.push(prepare(run, params[name]));
  if (found) tests.push((i) => found.get(rows.file[i])?.has(rows.row[i]) || false);
  const kept = [];
  for (let i = 0; i < run.count; i++) if (tests.every((test) => test(i))) kept.push(i);
  return kept;
}

/** Return {found, note} for a text: rows by file whose rollouts hold every word. */
async function search(run, text, progress) {
  if (!text) return { found: null, note: "" };
  const found = new Map();
  if (!window.BUNDLE) {
    const answer = await get(`run/${run.place}/search`, `?q=${encodeURIComponent(text)}`);
    for (const [file, rows] of Object.entries(answer.files)) found.set(Number(file), new Set(rows));
    return { found, note: [answer.done < answer.of ? `Words of ${answer.done} of ${answer.of} files are indexed so far.` : "", ...answer.wrong].join(" ") };
  }
  const words = text.toLowerCase().match(/[\p{L}\p{N}]+/gu) || [];
  for (const [f, file] of run.files.entries()) {
    let row = 0;
    for (let member = 0; member < file.members.length; member++) {
      const { records } = await get(`run/${run.place}/rollouts/${f}/${member}`);
      for (const record of records) {
        const said = textsOf(record).join("\n").toLowerCase();
        if (words.every((word) => said.includes(word))) { if (!found.has(f)) found.set(f, new Set()); found.get(f).add(row); }
        row++;
      }
    }
    progress?.(`${f + 1} of ${run.files.length} files searched`);
  }
  return { found, note: "" };
}

function textsOf(record) {
  const turns = (record.turns || []).flatMap((t) => [t.action, t.reason, ...(t.observation || []).map((m) => m.content)]);
  return [record.query, record.error, ...(record.experience || []).map((e) => e.content), ...turns].map((t) => String(t ?? ""));
}

function valuesOf(run, key) {
  const seen = new Set();
  for (let i = 0; i < run.count; i++) seen.add(key(run.rows, i));
  return [...seen].filter((v) => v !== null && v !== undefined).sort();
}

function filters(page, run, params) {
  if (run.choices?.count !== run.count) run.choices = { count: run.count }; // of each filter, the values that occur
  const values = (name) => (run.choices[name] ??= valuesOf(run, KEYS[name]));
  const go = () => {
    const wanted = Object.fromEntries([...new FormData(form)].filter(([, value]) => value !== ""));
    const kept = Object.fromEntries(["run", ...EXTRA].filter((n) => params[n]).map((n) => [n, params[n]]));
    location.hash = address(page, { ...kept, ...wanted });
  };
  const choice = (name) => {
    const options = name === "label" ? ["good", "bad", "abstained", "none"] : values(name);
    return el("label", null, name, el("select", { name, onchange: go }, el("option", { value: "" }, "any"),
      options.map((v) => el("option", { value: v, selected: String(v) === params[name] }, WORDS[name]?.[v] ?? String(v)))));
  };
  const field = (name, words, wide) => el("label", null, words, el("input", { name, value: params[name] || "", class: wide ? "wide" : null, spellcheck: "false", autocomplete: "off" }));
  const extra = EXTRA.filter((n) => params[n] !== undefined && params[n] !== "");
  const form = el("form", { class: "filters", onsubmit: (e) => { e.preventDefault(); go(); } },
    runChoice(page, params), field("step", "step, or 3-9"), CHOICES.filter((name) => name !== "world" || values(name).length > 1).map(choice), field("task", "task: id or words"), field("text", "words in the text", true),
    el("button", { type: "submit" }, "Filter"), link(page, { run: params.run }, "clear"),
    extra.map((n) => el("span", { class: "badge" }, `${n}: `, brief(params[n], 50), " ", link(page, { ...params, [n]: "" }, "×"))));
  const asked = [...CHOICES, "step", "task", "text"].some((n) => params[n]);
  return el("details", { open: window.innerWidth > 600 || asked }, el("summary", null, "filters"), form);
}

async function chosenRows(params) {
  const run = chosen(params);
  if (await run.loadPart()) finish(run);
  const began = performance.now();
  const { found, note } = await search(run, params.text, status);
  const picked = select(run, params, found);
  view.filtered = performance.now() - began; // milliseconds, for measurements
  const missing = run.pending ? `${number(run.pending)} older files are still being read. ` : "";
  return { run, picked, note: missing + note };
}

/** Read the rest of the index while the page shows the latest rollouts, and then draw the page again. */
function finish(run) {
  run.finishing ??= run.loadRows().then(() => {
    const typing = document.activeElement?.closest?.("form.filters");
    if (["rollouts", "groups"].includes(place()[0]) && !typing) return show(true);
  }).catch((error) => status(String(error.message || error))).finally(() => { run.finishing = null; });
}

function facets(page, run, params, picked) {
  const parts = [];
  for (const name of ["success", "fate", "stop", "world", "origin", "guided"]) {
    const counts = new Map();
    for (const i of picked) { const v = KEYS[name](run.rows, i); counts.set(v, (counts.get(v) || 0) + 1); }
    if (counts.size < 2) continue;
    parts.push(el("div", null, el("span", { class: "soft" }, `${name}: `), [...counts].sort((a, b) => b[1] - a[1]).map(([v, n]) =>
      el("span", { class: "badge" }, link(page, { ...params, [name]: v }, `${WORDS[name]?.[v] ?? v} ${number(n)}`)))));
  }
  return parts;
}

function outcome(run, i) {
  const won = run.rows.success[i];
  return el("span", { class: won ? "good" : "bad" }, won ? "success" : "failure", run.rows.score[i] !== null && run.rows.score[i] !== (won ? 1 : 0) ? ` ${short(run.rows.score[i])}` : "");
}

const toRollout = (run, i, ...words) => link("rollout", { run: run.place, file: run.rows.file[i], row: run.rows.row[i] }, words);

/** Return a link to the rollouts of the same file: "12", "held-out 20", "eval". */
function toStep(run, i) {
  const kind = run.rows.kind[i], step = run.rows.step[i], words = step === null ? [] : [short(step)];
  return link("rollouts", { run: run.place, kind, step }, (kind === "step" ? words : [kind.replace("_", "-"), ...words]).join(" "));
}

const groupOf = (run, i) => ({ run: run.place, file: run.rows.file[i], task: run.rows.task[i], draw: run.rows.draw[i] ?? "", fate: decoding(run.rows, i) });

/** Return a list of what could not be read, nothing if there is none. */
function faultList(faults) {
  return faults.length ? el("details", null, el("summary", { class: "warn" }, "what could not be read"), el("ul", null, faults.map((fault) => el("li", null, fault)))) : null;
}

async function rolloutsPage(params) {
  const { run, picked, note } = await chosenRows(params), r = run.rows;
  const columns = [
    { name: "step", n: true, sort: (i) => r.step[i], cell: (i) => toStep(run, i) },
    { name: "rollout", n: true, sort: (i) => r.rollout[i], cell: (i) => toRollout(run, i, `#${r.rollout[i]}`) },
    { name: "task", t: true, sort: (i) => r.task[i], cell: (i) => [link("group", groupOf(run, i), brief(run.queries[r.task[i]] || r.task[i], 110))] },
    { name: "level", n: true, sort: (i) => r.difficulty[i], cell: (i) => short(r.difficulty[i]) },
    { name: "outcome", sort: (i) => r.score[i], cell: (i) => outcome(run, i) },
    { name: "ended by", sort: (i) => r.stop[i], cell: (i) => r.stop[i] },
    { name: "fate", sort: (i) => r.fate[i], cell: (i) => r.fate[i] },
    { name: "guided", sort: (i) => r.experience[i].length, cell: (i) => (r.experience[i].length ? "guided" : "") },
    { name: "turns", n: true, sort: (i) => r.turns[i], cell: (i) => toRollout(run, i, short(r.turns[i])) },
    { name: "tokens", n: true, sort: (i) => r.tokens[i], cell: (i) => toRollout(run, i, number(r.tokens[i])) },
    { name: "labels", n: true, sort: (i) => r.good[i] - r.bad[i], cell: (i) => (!ofTraining(r, i) ? "–" : toRollout(run, i, el("span", { class: "good" }, `+${r.good[i]}`), " ", el("span", { class: "bad" }, `−${r.bad[i]}`))) },
    { name: "advantage", n: true, sort: (i) => r.advantage[i], cell: (i) => (r.advantage[i] === null || !ofTraining(r, i) ? "–" : toRollout(run, i, r.advantage[i].toFixed(3))) },
  ];
  const won = picked.filter((i) => r.success[i]).length;
  return [
    el("h1", null, `Rollouts of ${run.name}`), filters("rollouts", run, params),
    el("p", null, el("b", null, number(picked.length)), ` of ${number(run.count)}`, picked.length ? [", ", link("rollouts", { ...params, success: 1 }, `${percent(won / picked.length)}% successes`)] : "", " · ", link("groups", params, "as groups"),
      run.broken ? el("span", { class: "warn" }, ` · ${number(run.broken)} lines could not be read`) : "", note ? el("span", { class: "warn" }, ` · ${note}`) : ""),
    faultList(run.faults), el("div", null, facets("rollouts", run, params, picked)),
    table(columns, picked, { sort: 0 }),
  ];
}

async function groupsPage(params) {
  const { run, picked, note } = await chosenRows(params), r = run.rows, groups = new Map();
  for (const i of picked) {
    const key = groupKey(r, i);
    if (!groups.has(key)) groups.set(key, { first: i, all: [], guided: [], unguided: [] });
    const g = groups.get(key);
    g.all.push(i);
    (r.experience[i].length ? g.guided : g.unguided).push(i);
  }
  const rate = (list) => (list.length ? list.filter((i) => r.success[i]).length / list.length : null);
  const mean = (list, column) => (list.length ? list.reduce((sum, i) => sum + (r[column][i] || 0), 0) / list.length : null);
  const spread = (list) => { const m = mean(list, "score"); return Math.sqrt(list.reduce((s, i) => s + ((r.score[i] || 0) - m) ** 2, 0) / list.length); };
  const part = (g, list, more) => (list.length ? link("rollouts", { ...groupOf(run, g.first), ...more }, `${list.filter((i) => r.success[i]).length}/${list.length}`) : "–");
  const columns = [
    { name: "step", n: true, sort: (g) => r.step[g.first], cell: (g) => toStep(run, g.first) },
    { name: "task", t: true, sort: (g) => r.task[g.first], cell: (g) => link("group", groupOf(run, g.first), brief(run.queries[r.task[g.first]] || r.task[g.first], 130)) },
    { name: "origin", sort: (g) => r.origin[g.first], cell: (g) => r.origin[g.first] },
    { name: "level", n: true, sort: (g) => r.difficulty[g.first], cell: (g) => short(r.difficulty[g.first]) },
    { name: "held out", sort: (g) => decoding(r, g.first), cell: (g) => decoding(r, g.first) },
    { name: "successes", n: true, sort: (g) => rate(g.all), cell: (g) => part(g, g.all, {}) },
    { name: "guided", n: true, sort: (g) => rate(g.guided), cell: (g) => part(g, g.guided, { guided: 1 }) },
    { name: "unguided", n: true, sort: (g) => rate(g.unguided), cell: (g) => part(g, g.unguided, { guided: 0 }) },
    { name: "mean score", n: true, sort: (g) => mean(g.all, "score"), cell: (g) => link("group", groupOf(run, g.first), short(mean(g.all, "score"))) },
    { name: "sd of scores", n: true, sort: (g) => spread(g.all), cell: (g) => link("group", groupOf(run, g.first), short(spread(g.all))) },
    { name: "trained", n: true, sort: (g) => g.all.filter((i) => r.fate[i] === "trained").length, cell: (g) => link("rollouts", { ...groupOf(run, g.first), fate: "trained" }, g.all.filter((i) => r.fate[i] === "trained").length) },
    { name: "turns", n: true, sort: (g) => mean(g.all, "turns"), cell: (g) => link("group", groupOf(run, g.first), short(mean(g.all, "turns"))) },
  ];
  return [
    el("h1", null, `Groups of ${run.name}`), filters("groups", run, params),
    el("p", null, el("b", null, number(groups.size)), ` groups with ${number(picked.length)} rollouts · `, link("rollouts", params, "as rollouts"), note ? el("span", { class: "warn" }, ` · ${note}`) : ""),
    faultList(run.faults), table(columns, [...groups.values()], { sort: 0 }),
  ];
}

/** Return the experience that a rollout was shown, and the tasks whose attempts it came from. */
function shownExperience(run, record, pool) {
  return (record.experience || []).map((e) => {
    const sources = pool.find((known) => known.id === e.id)?.sources || [];
    return el("div", { class: "soft" }, "shown: ", link("experience", { run: run.place, id: e.id }, brief(e.content, 300)),
      sources.length ? [" from ", sources.slice(0, 3).map((id) => [link("task", { run: run.place, id }, brief(run.queries[id] || id, 50)), " "])] : "");
  });
}

function verdict(turn) {
  const name = turn.label === 1 ? "GOOD" : turn.label === -1 ? "BAD" : turn.reason ? "abstained" : "";
  return name ? el("div", null, el("b", { class: turn.label === 1 ? "good" : turn.label === -1 ? "bad" : "soft" }, name), " ", el("span", { class: "soft", dir: "auto" }, brief(turn.reason, 400))) : null;
}

/** Return the parts of a turn's advantage, and the world's reward of the turn, as far as there are any. */
function parts(turn) {
  const outcome = turn.outcome_advantage, told = [];
  if (Number.isFinite(outcome) && Number.isFinite(turn.advantage)) told.push(`= outcome ${signed(outcome)}, labels ${signed(turn.advantage - outcome)}`);
  if (turn.reward) told.push(`reward ${signed(turn.reward)}`);
  return told.length ? el("span", { class: "soft" }, told.join(" · ")) : "";
}

/** Return the answer that was expected beside the one that was given, nothing if none is known. */
function answers(record) {
  return record.expected ? el("div", { dir: "auto" }, el("span", { class: "soft" }, "expected answer: "), brief(record.expected, 300), el("span", { class: "soft" }, " · given: "), record.given ? brief(record.given, 300) : "none") : null;
}

const signed = (value) => value === null ? "not finite" : `${(value || 0) >= 0 ? "+" : "−"}${Math.abs(value || 0).toFixed(3)}`;

function advantageMark(value, scale) {
  const strength = Math.min(1, Math.abs(value || 0) / (scale || 1));
  return el("span", { class: "badge", style: { background: `color-mix(in srgb, var(${value < 0 ? "--down" : "--up"}) ${Math.round(45 * strength)}%, transparent)` } }, `advantage ${signed(value)}`);
}

function observations(turn) {
  const messages = turn.observation || [];
  const size = messages.reduce((sum, m) => sum + String(m.content ?? "").length, 0);
  const role = (m) => (messages.length > 1 || m.role !== "tool" ? el("div", { class: "soft" }, m.role) : null);
  const body = () => messages.map((m) => [role(m), block(m.content ?? "", 1000)].filter(Boolean));
  if (!messages.length) return null;
  const count = turn.info?.errors, errors = count ? el("span", { class: "bad" }, ` ${count} ${count === 1 ? "error" : "errors"}`) : null;
  const box = el("details", { open: size <= 160 }, el("summary", null, `result, ${number(size)} characters`, errors));
  const fill = () => { if (box.childElementCount === 1) box.append(...body().flat()); };
  box.addEventListener("toggle", () => box.open && fill());
  if (size <= 160) fill();
  return box;
}

async function groupPage(params) {
  const run = chosen(params);
  const [pool] = await Promise.all([once(`run/${run.place}/experience`), run.loadFile(params.file)]);
  const members = select(run, { file: params.file, task: params.task, draw: params.draw, fate: params.fate });
  if (!members.length) throw new Error("no rollout of this run belongs to this group; the run may have been resumed");
  const found = (await Promise.all(members.map((i) => run.record(i)))).map((f) => f.record), r = run.rows, first = members[0];
  const scale = Math.max(...found.flatMap((f) => f.turns.map((t) => Math.abs(t.advantage || 0))), 1e-9);
  const turns = Math.max(...found.map((f) => f.turns.length)); // in rows that the columns of all rollouts share
  const grid = el("div", { class: "side", tabindex: 0, role: "region", "aria-label": "rollouts side by side" }, found.map((record, k) =>
    el("section", { style: { gridRow: `1 / span ${turns + 2}` }, "aria-label": `rollout ${record.rollout}` },
      el("div", { class: "head" }, el("div", null, toRollout(run, members[k], `rollout ${record.rollout}`), " ", outcome(run, members[k])),
        el("span", { class: "badge" }, `ended by ${record.stop}`), el("span", { class: "badge" }, record.fate), el("span", { class: "badge" }, record.experience.length ? "guided" : "unguided")),
      el("div", null, record.error ? el("div", { class: "bad" }, brief(record.error, 300)) : null, answers(record), shownExperience(run, record, pool)),
      record.turns.map((turn, n) => el("div", { class: `cell ${turn.label === 1 ? "up" : turn.label === -1 ? "down" : ""}` },
        el("div", null, el("span", { class: "soft" }, `turn ${n + 1} `), toRollout(run, members[k], advantageMark(turn.advantage, scale)), parts(turn)), block(turn.action, 700), verdict(turn), observations(turn))))));
  const step = r.step[first];
  return [
    el("h1", { dir: "auto" }, ...brief(found[0].query, 400)),
    el("p", null, link("rollouts", { run: run.place, kind: r.kind[first], step }, `${r.kind[first].replace("_", "-")} ${step ?? ""}`), decoding(r, first) ? ` · ${decoding(r, first)}` : "", " · ", link("task", { run: run.place, id: r.task[first] }, r.task[first]), ` · ${r.origin[first]} · difficulty ${short(r.difficulty[first])} · `,
      link("rollouts", groupOf(run, first), `${found.filter((f) => f.success).length} of ${found.length} succeeded`)),
    neighbours(run, first), el("details", null, el("summary", null, "opening messages"), (found[0].messages || []).map((m) => [el("div", { class: "soft" }, m.role), block(m.content ?? "")])),
    grid,
  ];
}

/** Return links to the groups before and after in the same file. */
function neighbours(run, first) {
  const r = run.rows, seen = [];
  const key = (i) => groupKey(r, i);
  const known = new Set();
  for (let i = 0; i < run.count; i++) if (r.file[i] === r.file[first] && !known.has(key(i))) { known.add(key(i)); seen.push(i); }
  const at = seen.findIndex((i) => key(i) === key(first));
  return el("p", null, at > 0 ? el("a", { href: address("group", groupOf(run, seen[at - 1])), rel: "prev" }, "← previous group") : "", " ",
    at + 1 < seen.length ? el("a", { href: address("group", groupOf(run, seen[at + 1])), rel: "next" }, "next group →") : "");
}

// --- one rollout, token by token -------------------------------------------------------------------------------------

/** Ways to colour tokens: value(token) and the span of the scale; null = no value. */
const COLOURINGS = {
  advantage: { words: "advantage", value: (t) => t.advantage, centre: 0 },
  mask: { words: "loss mask: 1 = this token trains", value: (t) => t.mask, centre: 0, most: 1 },
  logprob: { words: "log-probability when sampled, nats", value: (t) => t.logprob, centre: 0, most: 5 },
  gap: { words: "learner's log-probability before the update minus the engine's, nats", value: (t) => t.gap, centre: 0 },
  ratio: { words: "probability at the update over that before it", value: (t) => t.ratio, centre: 1 },
};

function tokensOf(turn, k, trained) {
  return (turn.tokens || []).map((id, n) => ({
    id, place: n, turn: k, advantage: turn.advantages?.[n] ?? turn.advantage, mask: trained ? 1 : 0, logprob: turn.logprobs?.[n] ?? null,
    gap: turn.gap?.[n] ?? null, ratio: turn.ratio?.[n] ?? null,
  }));
}

function tint(value, colouring, most) {
  if (value === null || value === undefined) return "";
  const off = value - colouring.centre, strength = Math.min(1, Math.abs(off) / (most || 1));
  return strength < 0.004 ? "" : `color-mix(in srgb, var(${off < 0 ? "--down" : "--up"}) ${Math.round(8 + 52 * strength)}%, transparent)`;
}

const TOKENS = 3000; // tokens of one turn that are drawn at once

async function rolloutPage(params) {
  const run = chosen(params);
  const [pool] = await Promise.all([once(`run/${run.place}/experience`), run.loadFile(params.file)]);
  const r = run.rows, members0 = select(run, { file: params.file });
  const i = members0.find((k) => String(r.row[k]) === params.row);
  if (i === undefined) throw new Error("there is no such rollout; the run may have been resumed");
  const { record, pieces, without_pieces } = await run.record(i);
  const members = members0.filter((k) => groupKey(r, k) === groupKey(r, i)), at = members.indexOf(i);
  const trained = record.fate === "trained", turns = record.turns.map((turn, k) => [turn, tokensOf(turn, k, trained)]);
  const colour = COLOURINGS[params.colour] ? params.colour : "advantage", colouring = COLOURINGS[colour];
  const values = turns.flatMap(([, tokens]) => tokens.map((t) => Math.abs((colouring.value(t) ?? colouring.centre) - colouring.centre)));
  const most = colouring.most || values.reduce((a, b) => Math.max(a, b), 0) || 1;
  const said = el("div", { id: "token", role: "status" }, "Point at a token, or move to it with Tab, to read its values.");
  const go = (more) => { location.hash = address("rollout", { ...params, ...more }); };
  const step = (k, rel, words) => (members[k] === undefined ? "" : el("a", { href: address("rollout", { ...params, row: r.row[members[k]] }), rel }, words));
  const bar = el("div", { class: "bar" }, el("label", null, "colour by ", el("select", { "aria-label": "colour by", onchange: (e) => go({ colour: e.target.value }) }, Object.keys(COLOURINGS).map((c) => el("option", { value: c, selected: c === colour }, c)))),
    el("span", { class: "soft" }, `${short(colouring.centre - most)} `, el("span", { class: "scale", style: { background: `linear-gradient(90deg, ${tint(colouring.centre - most, colouring, most)}, transparent, ${tint(colouring.centre + most, colouring, most)})` } }), ` ${short(colouring.centre + most)}`),
    el("span", { class: "soft" }, colouring.words), step(at - 1, "prev", "← previous"), step(at + 1, "next", "next →"));
  const missing = turns.some(([, tokens]) => tokens.length) && !turns.some(([, tokens]) => tokens.some((t) => colouring.value(t) !== null && colouring.value(t) !== undefined));
  return [
    el("h1", { dir: "auto" }, ...brief(record.query, 400)),
    el("p", null, link("group", groupOf(run, i), `rollout ${record.rollout} of its group`), ` (${at + 1} of ${members.length}) · `, outcome(run, i), ` · ended by ${record.stop} · ${record.fate} · `, link("task", { run: run.place, id: record.task }, record.task),
      ` · ${r.kind[i].replace("_", "-")} ${r.step[i] ?? ""} · seed ${record.seed ?? "–"}`),
    record.components && Object.keys(record.components).length ? el("p", { class: "soft" }, "components: ", Object.entries(record.components).map(([k, v]) => `${k} ${short(v)}`).join(", ")) : null,
    record.error ? el("p", { class: "bad" }, ...brief(record.error, 1000)) : null, answers(record), ...shownExperience(run, record, pool),
    record.experience?.length && trained ? el("p", { class: "soft" }, "Guided: the engine saw the experience and the learner did not, so the gap includes what its removal changes.") : null,
    without_pieces ? el("p", { class: "warn" }, ...brief(without_pieces, 300)) : null, bar,
    missing ? el("p", { class: "soft" }, "This rollout has no values of this kind: it did not train, or an earlier version wrote it.") : null,
    ...turns.map(([turn, tokens], k) => turnBox(turn, tokens, k, colouring, most, pieces, said)), said,
  ];
}

function turnBox(turn, tokens, k, colouring, most, pieces, said) {
  const text = (id) => (pieces[id] !== undefined && pieces[id] !== "" ? pieces[id] : `⟨${id}⟩`);
  const prompt = (turn.prompt || []).map((id, n) => ({ id, place: n, prompt: true }));
  const draw = (token) => {
    const value = token.prompt ? null : colouring.value(token);
    const node = el("span", { class: token.prompt ? "p" : "k", tabindex: token.prompt ? null : 0, style: { background: tint(value, colouring, most) }, title: told(token) }, ...visible(text(token.id)));
    node.addEventListener("pointerenter", () => { said.textContent = told(token); });
    node.addEventListener("focus", () => { said.textContent = told(token); });
    return node;
  };
  const list = (all) => {
    const box = el("div", { class: "tokens" });
    let done = 0;
    const more = el("button", { type: "button", onclick: () => grow() });
    const grow = () => {
      more.remove();
      box.append(...all.slice(done, done + TOKENS).map(draw));
      done = Math.min(all.length, done + TOKENS);
      if (done < all.length) { more.textContent = `${number(all.length - done)} more tokens`; box.append(" ", more); }
    };
    grow();
    return box;
  };
  const before = el("details", null, el("summary", null, turn.continues ? `${number(prompt.length)} new tokens of the prompt (results of the last turn)` : `prompt, ${number(prompt.length)} tokens`));
  before.addEventListener("toggle", () => { if (before.open && before.childElementCount === 1) before.append(list(prompt)); });
  return el("section", { class: "turn", "aria-label": `turn ${k + 1}` },
    el("div", null, el("b", null, `Turn ${k + 1} `), el("span", { class: "badge" }, `advantage ${signed(turn.advantage)}`), parts(turn), " ", el("span", { class: "soft" }, [`${number(tokens.length)} tokens`, turn.version === undefined ? [] : `weights of step ${turn.version}`, turn.stop ?? []].flat().join(", "))),
    before, tokens.length ? list(tokens) : block(turn.action), verdict(turn), observations(turn));
}

function told(token) {
  const parts = [`id ${token.id}`, token.prompt ? "prompt: not trained" : `token ${token.place} of turn ${token.turn + 1}`];
  const add = (name, value) => { if (value !== null && value !== undefined) parts.push(`${name} ${short(value)}`); };
  if (!token.prompt) {
    parts.push(token.mask ? "trains" : "does not train");
    add("advantage", token.advantage);
    add("log p", token.logprob);
    add("gap", token.gap);
    add("ratio", token.ratio);
  }
  return parts.join(" · ");
}
