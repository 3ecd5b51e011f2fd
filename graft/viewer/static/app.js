// The page: which view is shown, which runs there are, and a pulse that tells when something is new.

import { ask, colourOf } from "./api.js";
import { Curves } from "./curves.js";
import { dotOf, hideTip, make, number } from "./dom.js";
import { EpisodeView } from "./episode.js";
import { saved } from "./saved.js";
import { Steps } from "./steps.js";
import { Summary } from "./summary.js";

const PULSE = 1000; // milliseconds between questions for news

const VIEWS = {
  summary: (main) => new Summary(main, state),
  curves: (main, query) => new Curves(main, state, query),
  steps: (main, query) => new Steps(main, state, query),
  episode: (main, query) => new EpisodeView(main, state, query),
};

const state = { runs: [], hidden: new Set(), explained: {}, say };
const main = document.getElementById("main");
const live = document.getElementById("live");
let view = null;
let beat = "";

function say(words) {
  live.textContent = words;
}

function show() {
  const [, name = "", query = ""] = /^#\/(\w+)\??(.*)$/.exec(location.hash) ?? [];
  const known = VIEWS[name] ? name : "summary";
  view?.close();
  hideTip();
  for (const link of document.querySelectorAll("nav a")) {
    const isHere = link.dataset.view === known;
    if (isHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    if (link.dataset.view === "episode") {
      link.hidden = !isHere && link.getAttribute("href") === "#/episode";
      if (isHere) link.href = location.hash;
    }
  }
  document.body.dataset.view = known;
  view = VIEWS[known](main, new URLSearchParams(query));
}

function showRuns() {
  const chips = state.runs.map((run) => {
    const of = run.steps ? `/${run.steps}` : "";
    const [before, after] = run.score;
    const score = before === null || after === null ? "" : ` · ${number(before, 3)} → ${number(after, 3)}`;
    const isShown = !state.hidden.has(run.run);
    const alarms = run.alarms.length ? make("span", { class: "count", title: "alarms" }, `▲${run.alarms.length}`) : null;
    return make("button", {
      type: "button", class: "run", "data-run": run.run, "data-status": run.status, "aria-pressed": isShown,
      title: `${run.folder}\n${run.env ?? ""} ${run.algo ?? ""}\nclick: show or hide its curves`,
      on: { click: () => {
        if (isShown) state.hidden.add(run.run);
        else state.hidden.delete(run.run);
        showRuns();
        view?.redraw?.();
      } },
    }, dotOf(colourOf(run.run)), make("b", {}, run.name), make("span", {}, ` ${run.status} · ${run.phase} ${run.step}${of}${score}`), alarms);
  });
  document.getElementById("runs").replaceChildren(...chips);
}

async function look() {
  state.runs = (await ask("runs")).runs;
  showRuns();
}

async function pulse() {
  if (!document.hidden) {
    try {
      const now = JSON.stringify(await ask("pulse"));
      if (live.dataset.lost) {
        delete live.dataset.lost;
        say("");
      }
      if (beat && now !== beat) {
        await look();
        view?.update();
      }
      beat = now;
    } catch (error) {
      live.dataset.lost = "1";
      say(`no answer from graft view: ${error.message}`);
    }
  }
  setTimeout(pulse, PULSE);
}

async function begin() {
  // the cookie knows the token now; an address that is copied or photographed need not show it
  if (location.search && !saved) history.replaceState(null, "", `/${location.hash}`);
  try {
    await look();
    state.explained = await ask("explain").catch(() => ({}));
  } catch (error) {
    main.replaceChildren(make("p", { class: "note" }, error.message));
    return;
  }
  addEventListener("hashchange", show);
  show();
  if (!saved) pulse();
}

begin();
