// The view of numbers: charts of the chosen metrics, one line per run.

import { ask, colourOf } from "./api.js";
import { Chart } from "./chart.js";
import { button, choice, dotOf, make, number, visible } from "./dom.js";
import { saved } from "./saved.js";

const USUAL = [
  "reward", "reward_std", "eval/sampled", "eval/greedy", "entropy", "loss", "completions/mean_length",
  "tools/rate", "tools/failure_frequency", "sampling/sampling_logp_difference/mean",
  "clip_ratio/region_mean", "frac_reward_zero_std", "grad_norm", "accuracy", "tokens_per_second",
];
const AXES = [["step", "step"], ["seconds", "relative time"], ["wall", "wall time"]];
const MOST_USUAL = 9;
const FEW_SETTINGS = 3; // in the line above the charts; a click shows all
const SEEDS = [["", "each run"], ["range", "mean, min to max"], ["std", "mean ± std"]];

export class Curves {
  constructor(main, state) {
    Object.assign(this, { main, state });
    this.how = { smoothing: 0, isLog: false, axis: "step", seeds: "", ...remembered("how", {}) };
    this.picked = remembered("picked", {}); // phase -> metrics
    this.charts = new Map();
    this.data = new Map();
    this.bands = new Map(); // "0,2": the runs 0 and 2 as one curve of each metric
    this.controls = make("div", { class: "controls" });
    this.settings = make("details", { class: "settings", hidden: true });
    this.alarms = make("details", { class: "alarms" });
    this.grid = make("div", { class: "charts" });
    main.replaceChildren(this.controls, this.settings, this.alarms, this.grid);
    this.build();
    this.compareSettings();
  }

  get phases() {
    return [...new Set(this.state.runs.flatMap((run) => Object.keys(run.metrics)))].sort();
  }

  get metrics() {
    return [...new Set(this.state.runs.flatMap((run) => run.metrics[this.phase] ?? []))].sort(byArea);
  }

  get chosen() {
    const there = new Set(this.metrics);
    const own = this.picked[this.phase];
    if (own) return own.filter((name) => there.has(name));
    const usual = USUAL.filter((name) => there.has(name)).slice(0, MOST_USUAL);
    // what a run has complained about is looked for
    const alarmed = this.state.runs.flatMap((run) => run.alarms.filter((alarm) => (alarm.phase || "rl") === this.phase && there.has(alarm.metric)).map((alarm) => alarm.metric));
    return [...new Set([...usual, ...alarmed])];
  }

  build() {
    const phases = this.phases;
    if (!phases.includes(this.phase)) this.phase = phases.includes("rl") ? "rl" : phases[0];
    const { how } = this;
    const strength = make("output", {}, number(how.smoothing, 2));
    const slider = make("input", {
      type: "range", min: 0, max: 0.99, step: 0.01, value: how.smoothing, "aria-label": "smoothing",
      on: { input: () => {
        how.smoothing = Number(slider.value);
        strength.textContent = number(how.smoothing, 2);
        this.redraw();
      } },
    });
    const isLog = make("input", { type: "checkbox", name: "log", checked: how.isLog, on: { change: () => {
      how.isLog = isLog.checked;
      this.redraw();
    } } });
    const seeds = choice("seeds", SEEDS, how.seeds, (seeds) => { how.seeds = seeds; this.redraw(); }, "seeds");
    seeds.title = "runs that differ in the seed alone: each for itself, or their mean; not on wall time, which they do not share";
    seeds.hidden = !this.state.runs.some((run) => run.seeds.length > 1);
    this.seeds = seeds.querySelector("select");
    this.controls.replaceChildren(
      ...(phases.length > 1 ? [choice("phase", phases, this.phase, (phase) => { this.phase = phase; this.build(); }, "phase")] : []),
      choice("x", AXES, how.axis, (axis) => { how.axis = axis; this.redraw(); }, "axis"),
      make("label", {}, "smoothing ", slider, strength),
      make("label", {}, isLog, " log scale"),
      seeds,
      this.picker(),
    );
    this.layOut();
  }

  picker() {
    const words = make("input", { type: "search", placeholder: "find a metric", "aria-label": "find a metric" });
    const list = make("div", { class: "metrics" });
    const fill = () => {
      const chosen = new Set(this.chosen);
      const shown = this.metrics.filter((name) => name.toLowerCase().includes(words.value.toLowerCase()));
      list.replaceChildren(...shown.map((name) => {
        const about = Object.values(this.state.explained[name] ?? {}).join("\n");
        const box = make("input", { type: "checkbox", value: name, checked: chosen.has(name), on: { change: () => {
          const now = this.chosen.filter((one) => one !== name);
          this.picked[this.phase] = box.checked ? [...now, name] : now;
          remember("picked", this.picked);
          this.layOut();
        } } });
        return make("label", { title: about || name }, box, ` ${name}`);
      }));
    };
    words.addEventListener("input", fill);
    const pick = (names) => {
      this.picked[this.phase] = names;
      remember("picked", this.picked);
      fill();
      this.layOut();
    };
    const usual = button("usual ones", () => pick(undefined));
    const none = button("none", () => pick([]));
    const box = make("details", { class: "picker", on: { toggle: fill } }, make("summary", {}, "metrics"), make("div", { class: "popup" }, make("div", {}, words, " ", usual, " ", none), list));
    box.addEventListener("keydown", (event) => { if (event.key === "Escape") box.open = false; });
    return box;
  }

  layOut() {
    this.signature = this.sign();
    const chosen = this.chosen;
    for (const [name, chart] of this.charts) {
      if (!chosen.includes(name)) {
        chart.close();
        this.charts.delete(name);
      }
    }
    for (const name of chosen) {
      if (!this.charts.has(name)) this.charts.set(name, new Chart(name, this.state.explained[name], (run, step) => openStep(this.state, run, this.phase, step)));
    }
    this.grid.replaceChildren(...chosen.map((name) => this.charts.get(name).element));
    if (!chosen.length) {
      this.grid.replaceChildren(make("p", { class: "note" }, this.phases.length ? "choose metrics above" : "no numbers yet: they appear with the first step"));
    }
    this.load();
  }

  async load() {
    const [phase, metrics] = [this.phase, this.chosen];
    if (!metrics.length) return;
    try {
      const found = await Promise.all(this.state.runs.map((run) => ask("curves", { run: run.run, phase, metrics: metrics.join(",") })));
      if (phase !== this.phase) return;
      this.data = new Map(found.map((one, i) => [this.state.runs[i].run, one]));
      this.bands = new Map();
      this.redraw();
    } catch (error) {
      this.state.say(error.message);
    }
  }

  redraw() {
    remember("how", this.how);
    const shown = this.state.runs.filter((run) => !this.state.hidden.has(run.run) && this.data.has(run.run));
    const numbers = shown.map((run) => run.run).join(",");
    this.seeds.disabled = this.how.axis === "wall";
    const groups = this.groups(shown);
    for (const [name, chart] of this.charts) {
      const series = groups.flatMap((runs) => (runs.length > 1 ? this.together(runs, name) : this.alone(runs[0], name)));
      chart.csv.href = `/api/csv?${new URLSearchParams({ runs: numbers, phase: this.phase, metrics: name })}`;
      chart.csv.hidden = Boolean(saved); // it is the server that writes the file
      chart.csv.download = `${name.replaceAll("/", "_")}.csv`;
      chart.show(series, this.how);
    }
    this.showAlarms(shown);
    this.showSettings(shown);
  }

  /** Shown runs, those that differ in the seed alone together where they are to be one curve. */
  groups(shown) {
    if (!this.how.seeds || this.how.axis === "wall") return shown.map((run) => [run]);
    const found = new Map();
    for (const run of shown) {
      const key = run.seeds.join(",");
      found.set(key, [...(found.get(key) ?? []), run]);
    }
    const groups = [...found.values()];
    this.loadBands(groups.filter((runs) => runs.length > 1));
    return groups;
  }

  async loadBands(groups) {
    const [phase, metrics] = [this.phase, this.chosen.join(",")];
    const { bands } = this;
    const wanted = groups.map(keyOf).filter((key) => bands.get(key)?.metrics !== metrics);
    if (!wanted.length) return;
    for (const key of wanted) bands.set(key, { metrics, found: {} }); // requested; not twice
    try {
      const found = await Promise.all(wanted.map((runs) => ask("band", { runs, phase, metrics })));
      if (bands !== this.bands || phase !== this.phase) return;
      wanted.forEach((key, i) => bands.set(key, { metrics, found: found[i] }));
      this.redraw();
    } catch (error) {
      this.state.say(error.message);
    }
  }

  /** The curve of one run, if it has the metric. */
  alone(run, name) {
    const data = this.data.get(run.run);
    if (!data.values[name]) return [];
    const x = data[this.how.axis];
    return [{ run, name: run.name, colour: colourOf(run.run), x, y: data.values[name], steps: data.step, alarms: this.marks(run, name, data.step, x) }];
  }

  /** One curve for several runs: their mean, and a band around it. */
  together(runs, name) {
    const data = this.bands.get(keyOf(runs))?.found[name];
    if (!data) return [];
    const x = data[this.how.axis];
    const away = (sign) => data.mean.map((mean, i) => mean + sign * data.std[i]);
    const [low, high] = this.how.seeds === "std" ? [away(-1), away(1)] : [data.low, data.high];
    const alarms = runs.flatMap((run) => this.marks(run, name, data.step, x));
    const about = `${runs[0].name}, mean of ${runs.length} seeds`;
    const band = { low, high, count: data.count, of: runs.length };
    return [{ run: runs[0], name: about, colour: colourOf(runs[0].run), x, y: data.mean, steps: data.step, alarms, band }];
  }

  marks(run, name, steps, x) {
    return run.alarms
      .filter((alarm) => alarm.metric === name && (alarm.phase || "rl") === this.phase)
      .map((alarm) => {
        const i = steps.findIndex((step) => step >= alarm.step);
        return { ...alarm, x: i < 0 ? null : x[i] };
      });
  }

  async compareSettings() {
    if (this.state.runs.length < 2) return;
    this.differing = await ask("settings").catch(() => ({}));
    this.redraw();
  }

  /** The settings of the runs that are shown, where they differ. */
  showSettings(runs) {
    const rows = Object.entries(this.differing ?? {})
      .map(([name, values]) => [name, runs.map((run) => values[run.run])])
      .filter(([, values]) => new Set(values).size > 1);
    this.settings.hidden = !rows.length;
    const short = rows.slice(0, FEW_SETTINGS).map(([name, values]) => `${visible(name)} ${values.map((value) => (value === null ? "–" : visible(value) || "“”")).join(" | ")}`);
    const more = rows.length > FEW_SETTINGS ? `, and ${rows.length - FEW_SETTINGS} more` : "";
    const head = make("tr", {}, make("th", { scope: "col" }, "setting"), ...runs.map((run) => make("th", { scope: "col" }, dotOf(colourOf(run.run)), visible(run.name))));
    const body = rows.map(([name, values]) => make("tr", {}, make("th", { scope: "row" }, visible(name)), ...values.map((value) => make("td", {}, value === null ? "–" : visible(value) || "“”"))));
    this.settings.replaceChildren(make("summary", {}, `${rows.length} setting${rows.length === 1 ? " differs" : "s differ"}: ${short.join(", ")}${more}`), make("div", { class: "scroll" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body))));
  }

  showAlarms(runs) {
    const rows = runs.flatMap((run) => run.alarms.map((alarm) => [run, alarm]));
    this.alarms.hidden = !rows.length;
    const lines = rows.slice(-100).reverse().map(([run, alarm]) =>
      make("li", { class: alarm.level === "alarm" ? "alarm" : "warn" },
        run.episodes.includes(String(alarm.step))
          ? make("a", { href: stepOf(run, alarm.step) }, `${run.name}, step ${alarm.step}`)
          : `${run.name}, step ${alarm.step}`,
        `, ${alarm.metric}: ${visible(String(alarm.text ?? ""))}`),
    );
    this.alarms.replaceChildren(make("summary", {}, `${rows.length} alarm${rows.length === 1 ? "" : "s"}`), make("ul", {}, ...lines));
  }

  /** Changes when there are other charts to draw or to choose from. */
  sign() {
    return JSON.stringify([this.phases, this.metrics, this.chosen]);
  }

  update() {
    if (this.sign() !== this.signature) this.build();
    else this.load();
  }

  close() {
    for (const chart of this.charts.values()) chart.close();
  }
}

/** Open the tasks of a step, the worst first; of the nearest step whose episodes were written down. */
export function openStep(state, run, phase, step) {
  const written = phase === "rl" ? run.episodes.filter((one) => !one.startsWith("failed")) : [];
  if (!written.length) return state.say(`${run.name} has no episodes of the phase ${phase}`);
  location.hash = stepOf(run, written.reduce((a, b) => (Math.abs(b - step) < Math.abs(a - step) ? b : a)));
}

export function stepOf(run, step) {
  return `#/steps?${new URLSearchParams({ run: run.run, step, sort: "reward", order: "rising" })}`;
}

function keyOf(runs) {
  return runs.map((run) => run.run).join(",");
}

/** Plain names first, then area/name. */
function byArea(a, b) {
  return a.includes("/") - b.includes("/") || (a < b ? -1 : 1);
}

function remembered(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(`graft.${name}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function remember(name, value) {
  try {
    localStorage.setItem(`graft.${name}`, JSON.stringify(value));
  } catch {
    // a browser without storage shows the usual metrics next time
  }
}
