// The pages and their addresses, and the look for news every few seconds.
"use strict";

const PAGES = {
  overview: ["Overview", overviewPage],
  rollouts: ["Rollouts", rolloutsPage],
  groups: ["Groups", groupsPage],
  tasks: ["Tasks", tasksPage],
  experience: ["Experience", experiencePage],
  judge: ["Judge", judgePage],
  group: ["", groupPage],
  rollout: ["", rolloutPage],
  task: ["", taskPage],
};
const EVERY = 3000; // milliseconds between two looks for news
let drawn = 0, before = "";

function place() {
  const [page, query] = location.hash.replace(/^#\/?/, "").split("?");
  return [PAGES[page] ? page : "overview", Object.fromEntries(new URLSearchParams(query || ""))];
}

/** Draw the page of the address. news: keep where the reader is, because only the data has changed. */
async function show(news = false) {
  const [page, params] = place(), mine = ++drawn, main = document.getElementById("main");
  document.getElementById("nav").replaceChildren(...Object.entries(PAGES).filter(([, [title]]) => title).map(([name, [title]]) =>
    el("a", { href: address(name, params.run ? { run: params.run } : {}), "aria-current": name === page ? "page" : null }, title)));
  const slow = setTimeout(() => { if (mine === drawn && !news) main.replaceChildren(el("p", { class: "soft" }, "Reading …")); }, 150);
  let nodes;
  try {
    nodes = await PAGES[page][1](params);
  } catch (error) {
    nodes = [el("h1", null, "This cannot be shown"), el("p", null, String(error.message || error))];
  }
  clearTimeout(slow);
  if (mine !== drawn) return;
  const now = document.getElementById("now")?.childNodes ?? [];
  const top = window.scrollY;
  main.replaceChildren(...[nodes].flat(4).filter(Boolean));
  document.getElementById("now")?.append(...now); // until the next look
  if (news) window.scrollTo(0, top);
  else { window.scrollTo(0, 0); main.focus({ preventScroll: true }); }
  document.title = `${main.querySelector("h1")?.textContent || "Evolver"} · Evolver`;
}

function status(text) { document.getElementById("live").textContent = text; }

async function look() {
  if (window.BUNDLE || document.hidden) return;
  try {
    const states = JSON.stringify(await get("states"));
    status("");
    if (states !== before) view.runs.forEach((run) => { run.fresh = false; });
    if (before && states !== before) {
      kept.clear();
      await Promise.all(view.runs.map((run) => run.load()));
      const [page] = place(), typing = document.activeElement?.closest?.("form.filters");
      if (["overview", "rollouts", "groups", "tasks", "experience", "judge"].includes(page) && !typing) await show(true);
      status("updated just now");
    }
    before = states;
    await showNow();
  } catch {
    status("the server does not answer");
  }
}

async function start() {
  try {
    view.runs = (await get("runs")).map((run, i) => new Run(i, run.name));
    await Promise.all(view.runs.map((run) => run.load()));
  } catch (error) {
    document.getElementById("main").append(el("p", null, String(error.message || error)));
    return;
  }
  window.addEventListener("hashchange", () => show());
  await show();
  await look();
  setInterval(look, EVERY);
}

document.querySelector(".skip").addEventListener("click", (event) => { // its address would name a page
  event.preventDefault();
  document.getElementById("main").focus();
});

// j and k, or the arrows, move between the rollouts of a group.
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const wanted = { j: "next", k: "previous", ArrowRight: "next", ArrowLeft: "previous" }[event.key];
  const target = wanted && document.querySelector(`a[rel~=${wanted === "next" ? "next" : "prev"}]`);
  if (target) { event.preventDefault(); location.hash = target.getAttribute("href"); }
});

start();
