// Tasks, experience and judges: tables whose numbers lead to the rollouts behind them.
"use strict";

/** Return {key: {all, won, steps: Map step → [won, all]}} of training rollouts, by keysOf(row). */
function tally(run, keysOf) {
  const r = run.rows, found = new Map();
  for (let i = 0; i < run.count; i++) {
    if (r.kind[i] !== "step") continue;
    for (const key of keysOf(i)) {
      if (!found.has(key)) found.set(key, { all: 0, won: 0, guided: 0, guidedWon: 0, steps: new Map(), rows: [] });
      const t = found.get(key), won = r.success[i] ? 1 : 0;
      t.all++; t.won += won; t.rows.push(i);
      if (r.experience[i].length) { t.guided++; t.guidedWon += won; }
      const s = t.steps.get(r.step[i]) || [0, 0];
      t.steps.set(r.step[i], [s[0] + won, s[1] + 1]);
    }
  }
  return found;
}

const EMPTY = { all: 0, won: 0, guided: 0, guidedWon: 0, steps: new Map(), rows: [] };
const rateLink = (run, won, all, params) => (all ? link("rollouts", { run: run.place, kind: "step", ...params }, `${percent(won / all)}% of ${number(all)}`) : "–");

async function tasksPage(params) {
  const run = chosen(params);
  const [tasks] = await Promise.all([once(`run/${run.place}/tasks`), run.loadRows()]);
  const tallies = tally(run, (i) => [run.rows.task[i]]);
  const known = new Set(tasks.map((t) => t.id));
  for (const id of tallies.keys()) if (!known.has(id)) tasks.push({ id, query: run.queries[id], gone: true });
  const levels = new Map(), gone = "no longer in the pool", state = { attempted: (h) => h.all > 0, sometimes: (h) => h.won > 0 && h.won < h.all };
  for (const t of tasks) {
    const key = `${t.env || ""}|${t.origin || gone}|${t.difficulty ?? ""}`, has = tallies.get(t.id) || EMPTY;
    const l = levels.get(key) || { env: t.env, origin: t.origin || gone, difficulty: t.difficulty, tasks: 0, tried: 0, all: 0, won: 0, sometimes: 0 };
    l.tasks++; l.tried += has.all > 0; l.all += has.all; l.won += has.won; l.sometimes += state.sometimes(has);
    levels.set(key, l);
  }
  const several = new Set(tasks.map((t) => t.env).filter(Boolean)).size > 1;
  const sparkline = (t) => { // the last steps; each of them is a link on the page of the task
    const points = [...t.steps].sort((a, b) => a[0] - b[0]).slice(-14);
    const words = points.map(([step, [won, all]]) => `step ${step}: ${won} of ${all}`).join("\n");
    return points.length ? el("a", { href: address("task", { run: run.place, id: t.id }), title: words, "aria-label": "success over time" }, points.map(([, [won, all]]) => "▁▂▃▄▅▆▇█"[Math.round((7 * won) / all)]).join("")) : "";
  };
  const some = (l, count, more) => (count ? link("tasks", { run: run.place, env: several ? l.env : "", origin: l.origin, difficulty: l.difficulty ?? "none", ...more }, number(count)) : "0");
  const shown = tasks.filter((t) => (!params.env || t.env === params.env) && (!params.origin || (t.origin || gone) === params.origin) && (!params.difficulty || String(t.difficulty ?? "none") === params.difficulty)
    && (!state[params.state] || state[params.state](tallies.get(t.id) || EMPTY)));
  const chosenBy = ["env", "origin", "difficulty", "state"].filter((n) => params[n]);
  return [
    el("h1", null, `Tasks of ${run.name}`), runChoice("tasks", params),
    table([
      ...(several ? [{ name: "world", sort: (l) => l.env, cell: (l) => l.env || "" }] : []),
      { name: "origin", sort: (l) => l.origin, cell: (l) => l.origin },
      { name: "difficulty", n: true, sort: (l) => l.difficulty, cell: (l) => short(l.difficulty) },
      { name: "tasks", n: true, sort: (l) => l.tasks, cell: (l) => some(l, l.tasks, {}) },
      { name: "attempted", n: true, sort: (l) => l.tried, cell: (l) => some(l, l.tried, { state: "attempted" }) },
      { name: "solved sometimes", n: true, sort: (l) => l.sometimes, cell: (l) => some(l, l.sometimes, { state: "sometimes" }) },
      { name: "successes", n: true, sort: (l) => l.won / l.all, cell: (l) => rateLink(run, l.won, l.all, { world: several ? l.env : "", difficulty: l.difficulty, origin: l.origin }) },
    ], [...levels.values()].sort((a, b) => (a.origin + (a.difficulty ?? "")).localeCompare(b.origin + (b.difficulty ?? "")))),
    el("h2", null, `${number(shown.length)} tasks`),
    chosenBy.length ? el("p", null, chosenBy.map((n) => el("span", { class: "badge" }, `${n}: ${params[n]} `, link("tasks", { ...params, [n]: "" }, "×")))) : null,
    table([
      { name: "task", t: true, sort: (t) => t.id, cell: (t) => link("task", { run: run.place, id: t.id }, brief(t.query || t.id, 140)) },
      ...(several ? [{ name: "world", sort: (t) => t.env, cell: (t) => t.env || "" }] : []),
      { name: "origin", sort: (t) => t.origin, cell: (t) => t.origin || el("span", { class: "soft" }, "deleted") },
      { name: "level", n: true, sort: (t) => t.difficulty, cell: (t) => short(t.difficulty) },
      { name: "successes", n: true, sort: (t) => { const h = tallies.get(t.id); return h ? h.won / h.all : null; }, cell: (t) => { const h = tallies.get(t.id) || EMPTY; return rateLink(run, h.won, h.all, { task: t.id }); } },
      { name: "attempts", n: true, sort: (t) => tallies.get(t.id)?.all || 0, cell: (t) => link("rollouts", { run: run.place, kind: "step", task: t.id }, number(tallies.get(t.id)?.all || 0)) },
      { name: "over time", cell: (t) => sparkline({ id: t.id, ...(tallies.get(t.id) || EMPTY) }) },
    ], shown, { sort: 4 }),
  ];
}

/** Return JSON in lines: what fits into one line stays there. */
function layout(value, indent = "") {
  const flat = JSON.stringify(value);
  if (flat.length + indent.length <= 110 || typeof value !== "object" || value === null) return flat;
  const inner = indent + "  ", list = Array.isArray(value);
  const parts = list ? value.map((v) => layout(v, inner)) : Object.entries(value).map(([k, v]) => `${JSON.stringify(k)}: ${layout(v, inner)}`);
  return `${list ? "[" : "{"}\n${parts.map((p) => inner + p).join(",\n")}\n${indent}${list ? "]" : "}"}`;
}

async function taskPage(params) {
  const run = chosen(params);
  const [tasks] = await Promise.all([once(`run/${run.place}/tasks`), run.loadRows()]);
  const place = tasks.findIndex((t) => t.id === params.id);
  const full = place >= 0 && !tasks[place].gone ? (await once(`run/${run.place}/tasks/${Math.floor(place / 64)}`))[place % 64] : null;
  const mine = tally(run, (i) => (run.rows.task[i] === params.id ? [0] : [])).get(0) || EMPTY, r = run.rows;
  const points = [...mine.steps].sort((a, b) => a[0] - b[0]);
  const groups = new Map(mine.rows.map((i) => [`${r.file[i]}|${r.draw[i]}`, i]));
  for (let i = 0; i < run.count; i++) if (r.task[i] === params.id && r.kind[i] !== "step") groups.set(`${r.file[i]}|${r.draw[i]}|${r.fate[i]}`, i);
  const section = (title, value) => (value === undefined || value === null || value === "" || (Array.isArray(value) && !value.length) ? [] : [el("h2", null, title), typeof value === "string" ? block(value) : Array.isArray(value) ? el("ol", null, value.map((v) => el("li", null, block(typeof v === "string" ? v : JSON.stringify(v))))) : block(layout(value), 4000)]);
  const meta = full?.meta || {}, sources = ["entry", "source"].filter((n) => typeof meta[n] === "string" && meta[n]);
  return [
    el("h1", { dir: "auto" }, ...brief(full?.query || run.queries[params.id] || params.id, 600)),
    el("p", null, params.id, full ? ` · ${full.origin} · ${full.split} · difficulty ${short(full.difficulty)} · seed ${full.seed}` : " · no longer in tasks.jsonl", " · ", rateLink(run, mine.won, mine.all, { task: params.id }),
      mine.guided ? [" · guided ", rateLink(run, mine.guidedWon, mine.guided, { task: params.id, guided: 1 }), " · unguided ", rateLink(run, mine.won - mine.guidedWon, mine.all - mine.guided, { task: params.id, guided: 0 })] : ""),
    sources.length ? el("p", null, "the walk started from ", [...new Set(sources.map((n) => meta[n]))].map((id) => [link("task", { run: run.place, id }, id), " "])) : null,
    points.length ? chart([{ name: "success", colour: colour(0), x: points.map((p) => p[0]), y: points.map(([, [won, all]]) => won / all), href: (k) => address("rollouts", { run: run.place, kind: "step", step: points[k][0], task: params.id }) }], { title: "Success over time, %", unit: percent, range: [0, 1], height: 220, wide: true, at: (step) => address("rollouts", { run: run.place, kind: "step", step, task: params.id }) }) : null,
    groups.size ? el("p", null, "groups: ", [...groups.values()].sort((a, b) => r.step[a] - r.step[b]).map((i) => [link("group", groupOf(run, i), `${r.kind[i] === "step" ? "step" : r.kind[i].replace("_", "-")} ${r.step[i] ?? ""} ${decoding(r, i)}`), " "])) : null,
    ...section(full?.origin === "synthetic" ? "The reference: what the walk did" : "The reference", full?.reference), ...section("The verifier", full?.verifier && Object.keys(full.verifier).length ? full.verifier : null), ...section("How it was made", Object.keys(meta).length ? meta : null),
  ];
}

async function experiencePage(params) {
  const run = chosen(params);
  const [pool] = await Promise.all([once(`run/${run.place}/experience`), run.loadRows()]);
  const r = run.rows, tallies = tally(run, (i) => r.experience[i]), known = new Set(pool.map((e) => e.id));
  const unguided = new Map();
  for (let i = 0; i < run.count; i++) {
    if (r.kind[i] !== "step" || r.experience[i].length) continue;
    const key = groupKey(r, i), u = unguided.get(key) || [0, 0];
    unguided.set(key, [u[0] + (r.success[i] ? 1 : 0), u[1] + 1]);
  }
  const without = (id) => { // the success of the unguided rollouts of the same groups, once per guided rollout
    let sum = 0, count = 0;
    for (const i of tallies.get(id)?.rows || []) { const u = unguided.get(groupKey(r, i)); if (u) { sum += u[0] / u[1]; count++; } }
    return count ? sum / count : null;
  };
  const rows = [...pool, ...[...tallies.keys()].filter((id) => !known.has(id)).map((id) => ({ id, gone: true, sources: [] }))].map((e) => ({ ...e, t: tallies.get(e.id) || EMPTY, without: without(e.id) }));
  const shown = params.id ? rows.filter((e) => e.id === params.id) : rows;
  const gain = (e) => (e.t.all && e.without !== null ? e.t.won / e.t.all - e.without : null);
  return [
    el("h1", null, `Experience of ${run.name}`), runChoice("experience", params),
    params.id ? el("p", null, link("experience", { run: run.place }, "all experience")) : null,
    el("p", { class: "soft" }, "“Without” is the success of the unguided rollouts of the same groups. Counts are of the rollouts in this workdir; experience that was deleted from the pool has no text here."),
    shown.length ? table([
      { name: "when, and what", t: true, cell: (e) => (e.gone ? link("rollouts", { run: run.place, experience: e.id }, e.id, " (deleted)") : [el("div", { class: "soft", dir: "auto" }, ...brief(e.when, 300)), el("div", { dir: "auto" }, ...brief(e.content, 600))]) },
      { name: "from", t: true, cell: (e) => (e.sources || []).slice(0, 6).map((id) => el("div", null, link("task", { run: run.place, id }, brief(run.queries[id] || id, 60)))) },
      { name: "since step", n: true, sort: (e) => e.step, cell: (e) => link("rollouts", { run: run.place, kind: "step", step: e.step }, short(e.step)) },
      { name: "uses", n: true, sort: (e) => e.t.all, cell: (e) => link("rollouts", { run: run.place, experience: e.id }, number(e.t.all)) },
      { name: "success with, %", n: true, sort: (e) => (e.t.all ? e.t.won / e.t.all : null), cell: (e) => link("rollouts", { run: run.place, experience: e.id, success: 1 }, e.t.all ? percent(e.t.won / e.t.all) : "–") },
      { name: "without, %", n: true, sort: (e) => e.without, cell: (e) => (e.without === null ? "–" : link("rollouts", { run: run.place, beside: e.id }, percent(e.without))) },
      { name: "difference", n: true, sort: gain, cell: (e) => { const g = gain(e); return g === null ? "–" : link("rollouts", { run: run.place, compared: e.id }, el("span", { class: g < 0 ? "bad" : "good" }, `${g < 0 ? "−" : "+"}${percent(Math.abs(g))}`)); } },
      { name: "counted by the pool", n: true, cell: (e) => (e.gone || !e.uses ? "–" : link("rollouts", { run: run.place, experience: e.id }, `${e.wins}/${e.uses}, expected ${short(e.expected)}`)) },
    ], shown, { sort: 3 }) : el("p", null, "There is no experience."),
  ];
}

async function judgePage(params) {
  const run = chosen(params);
  await run.loadRows();
  const r = run.rows, here = { run: run.place, kind: "step" };
  const reasons = tally(run, (i) => r.abstained[i]);
  const rows = Array.from({ length: run.count }, (_, i) => i).filter((i) => r.kind[i] === "step");
  const labelled = rows.filter((i) => r.good[i] || r.bad[i] || r.abstained[i].length);
  const turns = (list, column) => list.reduce((sum, i) => sum + r[column][i], 0);
  const cross = [["success", 1], ["failure", 0]].map(([words, success]) => {
    const list = labelled.filter((i) => (r.success[i] ? 1 : 0) === success);
    return { words, success, list, good: turns(list, "good"), bad: turns(list, "bad"), turns: turns(list, "turns") };
  });
  const judged = rows.filter((i) => r.judged[i] !== null && r.judged[i] !== undefined), checked = judged.filter((i) => r.verified[i] !== null && r.verified[i] !== undefined);
  const differ = checked.filter((i) => (r.judged[i] > 0.5) !== (r.verified[i] > 0.5));
  const rates = chart(["good", "bad", "abstain"].map((n, k) => series(run, `attributing/${n}_rate`, [2, 4, 0][k], { name: n })), { title: "Labels of turns, %", unit: percent, range: [0, 1], at: (step) => address("rollouts", { ...here, step }) });
  const agreed = chart([series(run, "questioning/judge/agreed_rate", 0, { name: "agreement" })], { title: "Agreement of judged outcomes with the verifier, %", unit: percent, range: [0, 1], at: (step) => address("rollouts", { ...here, step, judged: 1 }) });
  const ofStep = (step) => address("rollouts", { ...here, step });
  const costs = chart(["judge", "step_judge"].map((role, k) => series(run, `llm/${role}/money`, k, { name: role })), { title: "Cost: money per step", at: ofStep });
  const work = chart([series(run, "attributing/env_steps", 0, { name: "environment steps" })], { title: "Cost: environment steps replayed for labels", at: ofStep });
  const graded = chart([series(run, "time/grade", 0, { name: "seconds" })], { title: "Cost: seconds of a step for outcomes and labels", at: ofStep });
  const replay = (run.overview.replayed || [])[0];
  return [
    el("h1", null, `Judges of ${run.name}`), runChoice("judge", params),
    el("p", null, `Turns are labelled by ${run.overview.mechanisms.includes("attributing") ? run.overview.facts["attributing.judge.name"] || "replay" : "nobody"}.`),
    el("div", { class: "charts" }, [rates, agreed, work, graded, costs].filter(Boolean)),
    labelled.length ? [el("h2", null, "Labels and outcomes"), table([
      { name: "rollouts", cell: (c) => link("rollouts", { ...here, success: c.success }, `${c.words}: ${number(c.list.length)}`) },
      { name: "turns", n: true, cell: (c) => link("rollouts", { ...here, success: c.success }, number(c.turns)) },
      { name: "GOOD", n: true, cell: (c) => link("rollouts", { ...here, success: c.success, label: "good" }, number(c.good)) },
      { name: "BAD", n: true, cell: (c) => link("rollouts", { ...here, success: c.success, label: "bad" }, number(c.bad)) },
      { name: "no label", n: true, cell: (c) => link("rollouts", { ...here, success: c.success, label: "abstained" }, number(c.turns - c.good - c.bad)) },
    ], cross)] : el("p", null, "No turn has a label."),
    reasons.size ? [el("h2", null, "Abstentions"), table([
      { name: "reason", t: true, cell: ([reason]) => brief(reason, 300) },
      { name: "rollouts", n: true, sort: ([, t]) => t.all, cell: ([reason, t]) => link("rollouts", { ...here, reason }, number(t.all)) },
    ], [...reasons], { sort: 1 })] : null,
    judged.length ? [el("h2", null, "Outcomes scored by a language model"), el("p", null, link("rollouts", { ...here, judged: 1 }, `${number(judged.length)} judged`), checked.length ? [", of which the verifier checked ", link("rollouts", { ...here, checked: 1 }, number(checked.length)), ": it agrees with ", link("rollouts", { ...here, agrees: 1 }, `${percent(1 - differ.length / checked.length)}%`), ", ", link("rollouts", { ...here, differs: 1 }, `${number(differ.length)} differ`)] : "")] : null,
    ...agreement(run, replay),
    costTable(run) ? [el("h2", null, "Cost"), costTable(run)] : null,
  ].flat();
}

/** Return what `--replay` found: how a judge's labels compare with those of replaying the episodes. */
function agreement(run, replay) {
  if (!replay) return [];
  const names = { 1: "GOOD", "-1": "BAD", 0: "abstains" };
  return [el("h2", null, "Agreement with replay"),
    el("p", null, link("rollouts", { run: run.place, replayed: "any" }, `${number(replay.rollouts)} rollouts`), " were replayed. Of ", link("rollouts", { run: run.place, replayed: "any" }, `${number(replay.both)} turns`), " that both labelled, ", link("rollouts", { run: run.place, replayed: "any" }, `${percent(replay.both ? replay.agreed / replay.both : null)}%`), " have equal labels."),
    table([{ name: "judge", cell: (c) => names[c.judge] }, { name: "replay", cell: (c) => names[c.replay] }, { name: "turns", n: true, cell: (c) => link("rollouts", { run: run.place, replayed: `${c.judge},${c.replay}` }, number(c.turns)) },
      { name: "for example", cell: (c) => c.rollouts.slice(0, 5).map(([file, row]) => { const f = run.files.findIndex((x) => x.name === file); return f < 0 ? "" : [link("rollout", { run: run.place, file: f, row }, `${file.split(".")[0]} #${row}`), " "]; }) }], replay.table)];
}
