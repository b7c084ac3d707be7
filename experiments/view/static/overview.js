// The overview: held-out and training success, the fates of rollouts, speed, cost, alarms; several runs in one plot.
"use strict";

const colour = (i) => `var(--c${i % 8})`;
const FATES = ["trained", "no_signal", "overlong", "stale", "parse_error", "env_error", "cancelled"];
const HEALTH = ["entropy", "grad_norm", "kl_old", "ratio/max", "clip_fraction/on", "mismatch/abs", "mismatch/max", "rollout/turns", "rollout/tokens_per_turn", "learner/fill"];
const FAULTS = [
  ["alarm/weights", "the engine does not sample with the weights it was given", {}],
  ["alarm/no_signal", "all rollouts of each group scored alike: nothing trained", { fate: "no_signal" }],
  ["alarm/judge", "the judge of synthetic tasks differs from the world's own evaluation", { judged: 1 }],
  ["alarm/held_out", "success in training has risen and on held-out tasks fallen", { kind: "held_out" }],
  ["alarm/no_call", "many successes were reached without a call", {}],
  ["alarm/entropy", "hardly any entropy is left although most rollouts fail", {}],
  ["alarm/length", "rollouts have become much shorter", {}],
  ["alarm/repetition", "many rollouts repeat themselves", {}],
  ["skipped", "updates were skipped: loss or gradient was not finite", {}],
  ["ledger/env_error", "rollouts ended by a fault of the world", { fate: "env_error" }],
  ["ledger/cancelled", "rollouts cancelled at their deadline or not judged", { fate: "cancelled" }],
  ["eval/broken", "held-out rollouts that the world broke", { kind: "held_out", broken: 1 }],
  ["attributing/errors", "trajectories whose replay failed", {}],
  ["attributing/not_reproduced", "trajectories whose replay did not reproduce the outcome", {}],
  ["attributing/unanswered", "trajectories that the judge of turns gave no usable answer for", {}],
  ["questioning/judge/unanswered", "outcomes that were not judged", { fate: "cancelled" }],
  ["llm/unwritten/cache", "answers that could not be written to the cache", {}],
  ["llm/unwritten/ledger", "lines that could not be written to llm.jsonl", {}],
];

/** Return the measures of the evaluations of some runs: "avg@8", "greedy" ... */
function measuresOf(runs) {
  const names = runs.flatMap((run) => Object.keys(run.overview.metrics)
    .filter((name) => name.startsWith("eval/") && name.endsWith("/low")).map((name) => name.slice(5, -4)).filter((name) => !name.includes("/")));
  const order = (name) => ["avg", "gree", "best", "pass", "scor"].indexOf(name.slice(0, 4).replace("@", "").slice(0, name.startsWith("avg") ? 3 : 4));
  return [...new Set(names)].sort((a, b) => order(a) - order(b));
}

function series(run, name, i, extra = {}) {
  return { name, run, colour: colour(i), x: run.steps, y: run.metric(name), ...extra };
}

function heldOut(runs, measure) {
  const several = runs.length > 1, found = [];
  const line = (run, name, i, dash) => ({
    name: several ? `${run.name}: ${name}` : name, colour: colour(several ? run.place : i), dash, x: run.steps,
    y: run.metric(`eval/${name}`), low: dash ? null : run.metric(`eval/${name}/low`), high: dash ? null : run.metric(`eval/${name}/high`),
    href: (k) => address("rollouts", { run: run.place, kind: "held_out", step: run.steps[k], fate: name === "greedy" ? "greedy" : "sampled" }),
  });
  for (const run of runs) {
    found.push(line(run, measure, 0, false));
    if (measure !== "greedy") found.push(line(run, "greedy", 1, true));
  }
  const last = Math.max(1, ...runs.flatMap((run) => run.steps));
  for (const run of runs) { // the control: what the untrained policy reaches by its temperature alone
    const value = run.metric("eval/best_temperature/avg").find((v) => v !== null && v !== undefined);
    if (value !== undefined) {
      found.push({ name: `${several ? `${run.name}: ` : ""}untrained, at its best temperature`, colour: colour(several ? run.place : 2), dash: true, thin: true, x: [0, last], y: [value, value] });
    }
  }
  for (const run of runs) { // a policy that was scored with --mode=eval: a level to compare with
    for (const record of run.overview.evaluations) {
      const name = [measure, ...Object.keys(record).filter((key) => /^avg@\d+$/.test(key))].find((key) => typeof record[key] === "number");
      if (name === undefined) continue;
      found.push({ name: `${run.name}: ${name} of ${record.policy || "a random policy"}`, colour: colour(run.place + 2), dash: true, thin: true, x: [0, last], y: [record[name], record[name]] });
    }
  }
  return found;
}

function faultsOf(run) {
  const lines = run.overview.wrong.map((fault) => el("li", { class: "warn" }, fault));
  for (const [name, words, filter] of FAULTS) {
    const hit = run.steps.map((step, i) => [step, run.metric(name)[i]]).filter(([, value]) => value);
    if (!hit.length) continue;
    const total = hit.reduce((sum, [, value]) => sum + value, 0);
    const steps = hit.slice(-12).map(([step, value]) => [link("rollouts", { run: run.place, step, ...filter }, `step ${step}`), ` (${short(value)}) `]);
    lines.push(el("li", null, el("span", { class: "warn" }, `${short(total)} `), `${words}: `, steps, hit.length > 12 ? "and before" : ""));
  }
  for (const [role, account] of Object.entries(run.overview.accounts)) {
    const kinds = Object.entries(account.failures).map(([kind, count]) => `${kind} ${count}`);
    if (kinds.length || account.unanswered) {
      lines.push(el("li", null, link("judge", { run: run.place }, role), `: failed attempts ${kinds.join(", ") || 0}; unanswered ${account.unanswered}`));
    }
  }
  return lines;
}

/** Return the worlds of a run of several, [] for one. */
const worldsOf = (run) => Object.keys(run.overview.metrics).filter((name) => name.startsWith("rollout/success/world_")).map((name) => name.slice(22));

const KINDS = { original: { origin: "original" }, synthetic: { origin: "synthetic" }, guided: { guided: 1 }, unguided: { guided: 0 } };

/** Return the last value of a held-out measure, or its first, with a link to its rollouts. */
function heldOutLink(run, measure, first = false) {
  const values = run.metric(`eval/${measure}`), given = (v) => v !== null && v !== undefined;
  const at = first ? values.findIndex(given) : values.findLastIndex(given);
  const params = { run: run.place, kind: "held_out", step: run.steps[at], fate: measure === "greedy" ? "greedy" : "sampled" };
  return at < 0 ? "–" : link("rollouts", params, percent(values[at]));
}

function runTable(runs) {
  const last = (run, name) => { const v = run.metric(name).filter((x) => x !== null && x !== undefined); return v.length ? v[v.length - 1] : null; };
  const sum = (run, name) => run.metric(name).reduce((total, x) => total + (x || 0), 0);
  const measures = measuresOf(runs).slice(0, 2);
  const control = (run) => run.metric("eval/best_temperature/avg").find((v) => v !== null && v !== undefined);
  const latest = (run) => ({ run: run.place, kind: "step", step: last(run, "step") });
  return table([
    { name: "run", t: true, cell: (run) => [el("span", { style: { color: colour(run.place) } }, "● "), link("rollouts", { run: run.place }, run.name)] },
    { name: "what", t: true, cell: (run) => [run.overview.facts["env.name"] || "–", ", ", run.overview.mechanisms.join(", ") || "no mechanism", ", ", run.overview.facts["advantage.name"] || "–"] },
    { name: "seed", n: true, cell: (run) => link("rollouts", { run: run.place }, short(run.overview.seed)) },
    { name: "step", n: true, cell: (run) => [link("rollouts", latest(run), short(last(run, "step"))), run.overview.facts.steps ? ` of ${number(run.overview.facts.steps)}` : ""] },
    ...measures.flatMap((m, k) => [
      { name: `${m}, %`, n: true, cell: (run) => [heldOutLink(run, m, true), " → ", heldOutLink(run, m)] },
      ...(k ? [] : [{ name: "control, %", n: true, cell: (run) => (control(run) === undefined ? "–" : link("rollouts", { run: run.place, kind: "held_out", step: run.steps[0] }, percent(control(run)))) }]),
    ]),
    { name: "rollouts", n: true, cell: (run) => link("rollouts", { run: run.place, kind: "step" }, number(sum(run, "ledger/rollouts"))) },
    { name: "trained", n: true, cell: (run) => link("rollouts", { run: run.place, kind: "step", fate: "trained" }, number(sum(run, "ledger/trained"))) },
    { name: "time", n: true, cell: (run) => { const t = last(run, "time/elapsed"); return t === null ? "–" : link("rollouts", { run: run.place, kind: "step" }, clock(t)); } },
    { name: "tokens/s", n: true, cell: (run) => { const t = last(run, "time/tokens_per_s"); return t === null ? "–" : link("rollouts", latest(run), number(Math.round(t))); } },
    { name: "money", n: true, cell: (run) => (last(run, "llm/money") === null ? "–" : link("judge", { run: run.place }, short(last(run, "llm/money")))) },
  ], runs);
}

/** What a language model in a role worked on: a page and its filter. */
const WORK = {
  explorer: ["tasks", { origin: "synthetic" }], writer: ["tasks", { origin: "synthetic" }], judge: ["rollouts", { kind: "step", judged: 1 }],
  step_judge: ["rollouts", { kind: "step", labelled: 1 }], summariser: ["experience", {}], reranker: ["experience", {}], embedder: ["experience", {}],
};

function costTable(run) {
  const rows = Object.entries(run.overview.accounts);
  if (!rows.length) return null;
  const behind = (role, text) => { const [page, filter] = WORK[role] || ["rollouts", {}]; return link(page, { run: run.place, ...filter }, text); };
  return table([
    { name: "role", cell: ([role]) => behind(role, role) },
    ...["calls", "hits", "unanswered", "prompt_tokens", "completion_tokens", "money"].map((name) => ({ name: name.replace("_", " "), n: true, cell: ([role, a]) => behind(role, short(a[name])) })),
    { name: "seconds per call", n: true, cell: ([role, a]) => (a.calls ? behind(role, (a.seconds / a.calls).toFixed(2)) : "–") },
    { name: "failed attempts", cell: ([role, a]) => behind(role, Object.entries(a.failures).map(([k, n]) => `${k} ${n}`).join(", ") || "0") },
  ], rows);
}

const bytes = (n) => `${(n / 2 ** 30).toFixed(1)} GiB`;

/** Fill the place of the overview that shows what the runs are doing now. */
async function showNow() {
  const box = document.getElementById("now");
  if (!box || window.BUNDLE) return;
  const found = await Promise.all(view.runs.map((run) => get(`run/${run.place}/now`)));
  box.replaceChildren(...found.flatMap((processes, i) => processes.flatMap((p) => nowOf(view.runs[i], p))));
}

/** Return what one process of a run is doing: its servers, workers, queues, memory, speed and cost. */
function nowOf(run, p) {
  const list = (value) => (Array.isArray(value) ? value : []), old = p.age > 30;
  const queue = (q) => `${q.running ?? 0} running${q.waiting ? `, ${q.waiting} waiting` : ""}`;
  const rows = [
    ["tokens per second", short(p.tokens_per_s)],
    ["cost so far", `${short(p.money)} money, ${short(p.tokens)} tokens of language models`],
    ["workers", `${p.workers?.processes ?? "–"} (${p.workers?.mode ?? "–"}), ${p.workers?.episodes ?? 0} episodes`],
    ...list(p.memory).map((m) => [`memory, ${m.name}`, `${bytes(m.used)} of ${bytes(m.of)}`]),
    ...list(p.servers).map((s) => [`server ${s.name}`, [el("span", { class: s.state === "up" ? null : "warn" }, s.state), s.running === undefined ? "" : `, ${queue(s)}`, s.restarts ? `, started again ${s.restarts} times` : ""]]),
    ...list(p.queues).map((q) => [`queue of ${q.name}`, queue(q)]),
  ];
  return [
    el("h2", null, `Now: ${run.name} on ${p.host}`),
    el("p", { class: old ? "warn" : "soft" }, `${p.phase || "–"}, ${Math.round(p.age)} s ago${old ? ": the run was killed, or its machine stands still" : ""}`),
    table([{ name: "what", cell: ([name]) => name }, { name: "now", t: true, cell: ([, value]) => value }], rows),
  ];
}

async function overviewPage(params) {
  const runs = view.runs, several = runs.length > 1, one = chosen(params);
  const at = (run, more) => (step) => address("rollouts", { run: run.place, step, kind: "step", ...more });
  const ofRun = (step, series) => at(series.run ?? one)(step);
  const measures = measuresOf(runs), measure = measures.includes(params.measure) ? params.measure : measures[0];
  const charts = el("div", { class: "charts" });
  const add = (...figures) => charts.append(...figures.filter(Boolean));
  if (measure) {
    add(chart(heldOut(runs, measure), { title: `Held-out success, %: ${measure} with 95% intervals over tasks, of one run each; greedy and controls dashed`, unit: percent, range: [0, 1], wide: true, height: 250 }));
  }
  const success = several
    ? runs.map((run) => series(run, "rollout/success", run.place, { name: run.name }))
    : ["original", "synthetic", "guided", "unguided"].map((kind, i) => series(one, `rollout/success/${kind}`, i, { name: kind, thin: i > 1, dash: i > 1 }));
  add(chart(success, { title: "Success of training rollouts, %", unit: percent, range: [0, 1], at: several ? ofRun : (step, s) => at(one, KINDS[s.name])(step) }));
  const worlds = worldsOf(one), ofWorlds = (name) => worlds.map((world, i) => series(one, `${name}/world_${world}`, i, { name: world }));
  for (const [name, kind, words] of [["rollout/success", "step", "Success of training rollouts"], [`eval/${measure}`, "held_out", `Held-out success, ${measure}`]]) {
    if (worlds.length) add(chart(ofWorlds(name), { title: `${words}, by world, %${several ? ` (${one.name})` : ""}`, unit: percent, range: [0, 1], at: (step, s) => at(one, { kind, world: s.name })(step) }));
  }
  const total = one.metric("ledger/rollouts"), kept = one.steps.map((step, i) => i).filter((i) => total[i]);
  const share = (name) => kept.map((i) => (one.metric(`ledger/${name}`)[i] || 0) / total[i]);
  const fates = FATES.map((fate, i) => ({ name: fate, colour: colour(i), x: kept.map((k) => one.steps[k]), y: share(fate), href: (k) => at(one, { fate })(one.steps[kept[k]]) })).filter((s) => s.y.some((v) => v > 0));
  if (kept.length) add(chart(fates, { title: `Fates of rollouts, %${several ? ` (${one.name})` : ""}`, unit: percent, range: [0, 1], stacked: true, at: at(one) }));
  add(chart(runs.map((run) => series(run, "time/tokens_per_s", run.place, { name: run.name })), { title: "Generated tokens per second", at: ofRun }));
  const phases = Object.keys(one.overview.metrics).filter((n) => /^time\/\w+$/.test(n) && !["time/elapsed", "time/tokens_per_s", "time/checkpoint"].includes(n));
  const later = one.steps.map((s, i) => i).filter((i) => one.steps[i] > 0);
  add(chart(phases.map((name, i) => ({ name: name.slice(5), colour: colour(i), x: later.map((k) => one.steps[k]), y: later.map((k) => one.metric(name)[k] ?? 0) })), { title: `Seconds per step by phase${several ? ` (${one.name})` : ""}`, stacked: true, at: at(one) }));
  add(chart(runs.map((run) => series(run, "llm/money", run.place, { name: run.name })), { title: "Money spent on language models", at: ofRun }));
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.overview.metrics)))].filter((n) => n !== "step").sort();
  const wanted = params.metric && names.includes(params.metric) ? [params.metric] : [];
  for (const name of [...wanted, ...HEALTH]) add(chart(runs.map((run) => series(run, name, run.place, { name: run.name })), { title: name, height: 160, at: ofRun }));
  const faults = runs.flatMap((run) => { const f = faultsOf(run); return f.length ? [several ? el("h3", null, run.name) : null, el("ul", null, f)] : []; });
  const pick = (name, options, value, label) => el("label", null, label, el("select", { onchange: (e) => { location.hash = address("overview", { ...params, [name]: e.target.value }); } }, options.map((o) => el("option", { value: o, selected: o === value }, o || "–"))));
  return [
    el("h1", null, several ? `${runs.length} runs` : one.name),
    runTable(runs),
    el("div", { id: "now" }),
    measures.length ? el("p", { class: "soft" }, "Held-out scores before → latest; the control is the untrained policy at its best temperature.") : null,
    el("form", { class: "filters", onsubmit: (e) => e.preventDefault() },
      measures.length ? pick("measure", measures, measure, "held-out measure") : null,
      pick("metric", ["", ...names], params.metric || "", "another metric"), runChoice("overview", params)),
    charts.childElementCount ? charts : el("p", null, "There are no metrics yet."),
    el("h2", null, "Alarms and faults"), faults.length ? faults : el("p", { class: "soft" }, "None."),
    ...runs.flatMap((run) => { const t = costTable(run); return t ? [el("h2", null, `Calls to language models: ${run.name}`), t] : []; }),
    ...runs.flatMap(evaluationTable),
  ];
}

function evaluationTable(run) {
  const records = run.overview.evaluations;
  if (!records.length) return [];
  const names = Object.keys(records[0]).filter((n) => !n.includes("/") && !["policy", "split"].includes(n));
  const behind = (text) => link("rollouts", { run: run.place, kind: "eval" }, text);
  return [el("h2", null, `Evaluations with --mode=eval: ${run.name}`), table([
    { name: "policy", t: true, cell: (r) => behind(r.policy || "random") },
    { name: "split", cell: (r) => r.split },
    ...names.map((n) => ({ name: n, n: true, cell: (r) => behind(["tasks", "broken", "seeds"].includes(n) ? short(r[n]) : percent(r[n]) + (r[`${n}/low`] !== undefined ? ` [${percent(r[`${n}/low`])}, ${percent(r[`${n}/high`])}]` : "")) })),
  ], records)];
}
