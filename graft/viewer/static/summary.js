// The first page: what was trained and what came of it, its curve, an attempt, alarms, settings; the rest is folded.
// Several runs are compared first: one chart, a row for each of them, the settings in which they differ.

import { ask, colourOf, COLOURS } from "./api.js";
import { showAttempt } from "./attempt.js";
import { Chart } from "./chart.js";
import { openStep, stepOf } from "./curves.js";
import { dotOf, make, visible } from "./dom.js";
import { loadPicture } from "./experts.js";
import { saved } from "./saved.js";

const INTERVAL = 1.96; // standard errors to either side
const MANY_POINTS = 60; // from here on the curve is smoothed
const MOST_ALARMS = 4;
const MOST_SETTINGS = 8;
const LONGEST_WORD = 24; // a longer one may be broken at its hyphens
const HELD_OUT = "eval/sampled";

const opened = new Map(); // titles of what was folded or unfolded by hand

export class Summary {
  constructor(main, state) {
    Object.assign(this, { state, pages: new Map() });
    const names = ["note", "head", "chart", "compared"];
    this.parts = Object.fromEntries(names.map((name) => [name, new Part(name)]));
    this.runs = make("div", {});
    this.page = make("div", { class: "first" }, ...names.map((name) => this.parts[name].element), this.runs);
    main.replaceChildren(this.page);
    this.load();
  }

  async load() {
    const { runs } = this.state;
    try {
      const [found, differing] = await Promise.all([Promise.all(runs.map((run) => ask("summary", { run: run.run }))), runs.length > 1 ? ask("settings") : {}]);
      if (!this.page.isConnected) return;
      this.show(found, differing);
      await this.draw(found);
    } catch (error) {
      this.state.say(error.message);
    }
  }

  show(found, differing) {
    const { runs } = this.state;
    const { note, head, compared } = this.parts;
    if (saved) note.fill("", () => [make("p", { class: "note" }, `Saved ${saved.written} by graft ${saved.version}: all curves, and the best and the worst tasks of the first and the last step.`)]);
    if (runs.length > 1) {
      head.fill(runs.length, () => [make("h1", {}, `${runs.length} runs compared`)]);
      compared.fill([found, differing, runs.map((run) => run.alarms.length)], () => [make("div", { class: "tables" }, comparison(runs, found), ...differences(runs, differing))]);
    }
    for (const [i, run] of runs.entries()) {
      if (!this.pages.has(run.run)) this.pages.set(run.run, new RunPage(run, runs.length === 1));
      this.pages.get(run.run).show(run, found[i]);
    }
    if (this.runs.childElementCount !== runs.length) this.runs.replaceChildren(...runs.map((run) => this.pages.get(run.run).element));
  }

  /** The reward of every shown run, with held-out scores as marks. */
  async draw(found) {
    const all = this.state.runs;
    const [phase, metric] = all.some((run) => run.metrics.rl?.includes("reward")) ? ["rl", "reward"] : ["sft", "loss"];
    const runs = all.filter((run) => run.metrics[phase]?.includes(metric) && !this.state.hidden.has(run.run));
    if (!runs.length) return;
    const data = await Promise.all(runs.map((run) => ask("curves", { run: run.run, phase, metrics: `${metric},${HELD_OUT}` })));
    if (!this.page.isConnected) return;
    const place = all.length > 1 ? this.parts.chart : this.pages.get(all[0].run).parts.chart;
    this.chart ??= new Chart(metric, this.state.explained[metric], (run, step) => openStep(this.state, run, phase, step));
    this.chart.csv.hidden = true; // the view of curves has it
    const isOne = all.length === 1;
    const series = runs.map((run, i) => {
      const { step, values } = data[i];
      const marks = phase === "rl" ? heldOut(found[all.indexOf(run)].score, step, values[HELD_OUT] ?? [], isOne) : [];
      const alarms = run.alarms.filter((alarm) => alarm.metric === metric && (alarm.phase || "rl") === phase).map((alarm) => ({ ...alarm, x: alarm.step }));
      return { run, name: run.name, colour: colourOf(run.run), ink: isOne ? COLOURS[1] : undefined, x: step, y: values[metric], steps: step, alarms, marks };
    });
    const isSmooth = series.some((one) => one.x.length >= MANY_POINTS);
    const hasMarks = series.some((one) => one.marks.length);
    place.fill([phase, runs.map((run) => run.run), isSmooth, hasMarks], () => [
      this.chart.element,
      make("p", { class: "note legend" }, ...runs.map((run) => make("span", {}, dotOf(colourOf(run.run)), `${isOne ? `${metric} of each training step` : visible(run.name)}${isSmooth ? ", smoothed" : ""}`)),
        hasMarks ? make("span", {}, dotOf(isOne ? COLOURS[1] : "currentColor", "diamond"), "held-out score, with its 95% interval if known") : null),
    ]);
    this.chart.show(series, { smoothing: isSmooth ? 0.8 : 0, isLog: false, axis: "step" });
  }

  redraw() {
    this.load();
  }

  update() {
    this.load();
  }

  close() {
    this.chart?.close();
  }
}

/** A part of the page that is built again only if what it shows has changed. */
class Part {
  constructor(name) {
    this.element = make("section", { "data-part": name });
  }

  fill(data, build) {
    const now = JSON.stringify(data);
    if (now === this.before) return;
    this.before = now;
    this.element.replaceChildren(...build().filter(Boolean));
  }
}

/** One run: the whole page, or folded below a comparison. */
class RunPage {
  constructor(run, isAlone) {
    this.parts = Object.fromEntries(["head", "chart", "attempts", "alarms", "experts", "tables"].map((name) => [name, new Part(name)]));
    const parts = Object.values(this.parts).map((part) => part.element);
    this.title = make("summary", {});
    this.level = isAlone ? "h1" : "h2";
    this.element = make("article", { class: "summary", "data-run": run.run }, ...(isAlone ? parts : [make("details", { on: { toggle: () => this.fill() } }, this.title, ...parts)]));
  }

  show(run, found) {
    Object.assign(this, { run, found });
    this.title.replaceChildren(dotOf(colourOf(run.run)), make("b", {}, visible(run.name)), ` ${found.words}`);
    this.fill();
  }

  fill() {
    const { run, found, parts } = this;
    if (this.element.querySelector("details:not([open]) > [data-part]")) return; // folded: built when it is opened
    parts.head.fill([found.status, found.about, found.state, found.words, found.score, found.facts, found.leakage, found.written], () => head(run, found, this.level));
    parts.attempts.fill(found.attempts, () => [this.attempts()]);
    parts.alarms.fill([run.alarms, run.episodes], () => alarms(run));
    parts.experts.fill(found.experts, () => (found.experts ? loadPicture(found.experts) : []));
    parts.tables.fill(found.tables, () => tables(found.tables));
  }

  attempts() {
    const box = make("div", { class: "pair" });
    Promise.all(this.found.attempts.map((place) => showAttempt(this.run.run, place).catch(() => null)))
      .then((made) => box.replaceChildren(...made.filter(Boolean)));
    return box;
  }
}

function head(run, { status, about, state, words, score, facts, leakage, written }, level) {
  const sides = score ? [[`${leakage ? "Score" : "Held out"}, before`, score.before, score.errors[0]], [`${leakage ? "Score" : "Held out"}, after`, score.after, score.errors[1]]] : [];
  const shown = sides.filter(([, value]) => value !== null).map(([name, value, error]) => [name, value.toFixed(3), error ? `± ${(INTERVAL * error).toFixed(3)}` : ""]);
  return [
    make(level, {}, dotOf(colourOf(run.run)), visible(run.name), " ", make("span", { class: `status ${status}` }, status)),
    make("p", { class: "lead" }, words),
    leakage ? make("p", { class: "leakage" }, make("b", {}, "▲ These scores are not held out: "), make("bdi", {}, visible(leakage))) : null,
    make("p", {}, visible(about)),
    state ? make("p", { class: "state" }, visible(state)) : null,
    make("dl", { class: "tiles" }, ...[...shown, ...facts].map(([name, value, more]) => make("div", {}, make("dt", {}, name), make("dd", { class: "value" }, visible(value)), more ? make("dd", {}, visible(more)) : null))),
    make("p", { class: "note" }, [score?.of ? `Held out: ${score.of}.` : "", written ? `Last written ${written}.` : ""].join(" ")),
  ];
}

/** Marks of the scores before, on the way and after. */
function heldOut(score, steps, values, isNamed) {
  const mark = (x, y, error, when) => (y === null || y === undefined ? [] : [{ x, y, error: INTERVAL * (error ?? 0), words: when && isNamed ? `${when} ${y.toFixed(3)}` : "" }]);
  const [first, last] = [Math.min(0, steps[0] - 1), steps.at(-1)];
  const between = steps.flatMap((step, i) => (score?.after !== null && step === last ? [] : mark(step, values[i] ?? null, 0, "")));
  return [...mark(first, score?.before, score?.errors[0], "before"), ...between, ...mark(last, score?.after, score?.errors[1], "after")];
}

function alarms(run) {
  const lines = run.alarms.map((alarm) => make("li", { class: alarm.level === "alarm" ? "alarm" : "warn" },
    make("b", {}, "▲ ", run.episodes.includes(String(alarm.step)) ? make("a", { href: stepOf(run, alarm.step) }, `${alarm.phase === "sft" ? "warm-up " : ""}step ${alarm.step}`) : `step ${alarm.step}`, `, ${visible(alarm.metric)}: `),
    make("bdi", {}, visible(String(alarm.text ?? "")))));
  const rest = lines.slice(MOST_ALARMS);
  return [
    make("h2", {}, `Alarms${lines.length ? ` (${lines.length})` : ""}`),
    lines.length ? make("ul", {}, ...lines.slice(0, MOST_ALARMS)) : make("p", {}, run.step ? "None was raised." : "None yet."),
    rest.length ? folded(`${rest.length} more alarms`, make("ul", {}, ...rest), true) : null,
  ];
}

function tables(found) {
  const [open, closed] = [found.filter((table) => !table.folded), found.filter((table) => table.folded)];
  return [make("div", { class: "tables" }, ...open.map(showTable), make("div", { class: "folds" }, ...closed.map(showTable)))];
}

function comparison(runs, found) {
  const score = (one, side, i) => (one?.[side] === null || one?.[side] === undefined ? "–" : `${one[side].toFixed(3)}${one.errors[i] ? `\u00a0±\u00a0${(INTERVAL * one.errors[i]).toFixed(3)}` : ""}`);
  const rows = runs.map((run, i) => {
    const { status, facts, leakage } = found[i];
    const own = run.seeds?.length > 1 ? { before: run.score[0], after: run.score[1], errors: [] } : found[i].score;
    return [run.name, status, score(own, "before", 0), score(own, "after", 1) + (leakage ? " ▲\u00a0not\u00a0held\u00a0out" : ""), facts.find(([name]) => name === "Time")?.[1].replaceAll(" ", "\u00a0") ?? "–", String(run.alarms.length)];
  });
  return showTable({ title: "Runs", columns: ["run", "status", "held out, before", "after", "time", "alarms"], rows, folded: false, dots: runs });
}

function differences(runs, differing) {
  const rows = Object.entries(differing).map(([name, values]) => [name, ...values.map((value) => value ?? "–")]);
  const table = (title, rows, folded) => (rows.length ? [showTable({ title, columns: ["setting", ...runs.map((run) => run.name)], rows, folded })] : []);
  return [...table("Settings that differ", rows.slice(0, MOST_SETTINGS), false), ...table(`${rows.length - MOST_SETTINGS} more settings that differ`, rows.slice(MOST_SETTINGS), true)];
}

function showTable({ title, columns, rows, folded: isFolded, dots = [] }) {
  const cell = (tag, attributes, value, ...before) => make(tag, attributes, make("bdi", {}, ...before, ...breakable(visible(value) || "“”")));
  const top = make("tr", {}, ...columns.map((name) => cell("th", { scope: "col" }, name)));
  const body = rows.map((row, n) => make("tr", {}, ...row.map((value, i) => (i ? cell("td", {}, value) : cell("th", { scope: "row" }, value, ...(dots[n] ? [dotOf(colourOf(dots[n].run))] : []))))));
  const table = make("table", { "aria-label": title }, make("thead", {}, top), make("tbody", {}, ...body));
  return folded(title, make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, table), isFolded);
}

function folded(title, content, isFolded) {
  const box = make("details", { open: opened.get(title) ?? !isFolded, on: { toggle: () => opened.set(title, box.open) } }, make("summary", {}, make("h2", {}, title)), content);
  return box;
}

/** A long name may go on in the next line after a dot, slash or comma, never within a word or number: 1e-06, rl-000400. */
function breakable(text) {
  const parts = text.split(/(?<=[./,])(?=[a-z"{[])|(?<=\s)/i);
  return parts.flatMap((part, i) => {
    const shown = part.length <= LONGEST_WORD && part.includes("-") ? make("span", { class: "whole" }, part) : part;
    return i ? [make("wbr"), shown] : [shown];
  });
}
