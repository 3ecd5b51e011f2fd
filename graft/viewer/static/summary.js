// The view of a run as a whole: what it was, how it stands, and tables of scores, time and settings.

import { ask, colourOf } from "./api.js";
import { make, visible } from "./dom.js";
import { saved } from "./saved.js";

export class Summary {
  constructor(main, state) {
    Object.assign(this, { main, state });
    this.load();
  }

  async load() {
    try {
      const found = await Promise.all(this.state.runs.map((run) => ask("summary", { run: run.run })));
      const note = saved ? [make("p", { class: "note" }, `Saved ${saved.written} by graft ${saved.version}: all curves, and the best and the worst tasks of the first and the last step.`)] : [];
      this.main.replaceChildren(...note, ...found.map((summary, i) => this.show(this.state.runs[i], summary)));
    } catch (error) {
      this.state.say(error.message);
    }
  }

  show(run, { status, about, state, written, tables }) {
    const dot = make("span", { class: "dot" });
    dot.style.backgroundColor = colourOf(run.run);
    const alarms = run.alarms.map((alarm) => [`${alarm.phase} ${alarm.step}`, alarm.level, alarm.metric, alarm.text]);
    const listed = [...tables.slice(0, 1), { title: "Alarms", columns: ["step", "level", "metric", "what was seen"], rows: alarms, folded: false }, ...tables.slice(1)];
    return make("article", { class: "summary", "data-run": run.run },
      make("h2", {}, dot, visible(run.name), " ", make("span", { class: "status" }, status)),
      make("p", {}, visible(about), written ? ` Last written ${written}.` : ""),
      state ? make("p", { class: "state" }, visible(state)) : null,
      ...listed.filter((table) => table.rows.length).map(showTable));
  }

  update() {
    this.load();
  }

  close() {}
}

function showTable({ title, columns, rows, folded }) {
  const head = make("tr", {}, ...columns.map((name) => make("th", { scope: "col" }, name)));
  const body = rows.map((row) => make("tr", {}, ...row.map((value, i) => make(i ? "td" : "th", i ? {} : { scope: "row" }, make("bdi", {}, visible(value))))));
  const table = make("table", { "aria-label": title }, make("thead", {}, head), make("tbody", {}, ...body));
  return make("details", { open: !folded }, make("summary", {}, title), table);
}
