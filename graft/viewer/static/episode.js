// The view of one episode: its tree, the walk that is read, and another attempt at the same task beside it.

import { ask, colourOf } from "./api.js";
import { WAYS } from "./colours.js";
import { Contexts } from "./contexts.js";
import { choice, dotOf, make, number, oneLine, visible } from "./dom.js";
import { Transcript } from "./transcript.js";
import { Tree } from "./tree.js";

let way = "logprob"; // kept while one goes from task to task

export class EpisodeView {
  constructor(main, state, query) {
    Object.assign(this, { main, state, query });
    this.controls = make("div", { class: "controls" });
    this.panes = make("div", { class: "panes" });
    main.replaceChildren(this.controls, this.panes);
    this.place = { run: query.get("run") ?? 0, step: query.get("step") ?? "", line: query.get("line") ?? 0 };
    this.load();
  }

  async load() {
    const other = this.query.get("with")?.split(":");
    const places = [this.place, ...(other ? [{ run: other[0], step: other[1], line: other[2] }] : [])];
    try {
      this.episodes = await Promise.all(places.map((place) => ask("episode", place)));
    } catch (error) {
      this.panes.replaceChildren(make("p", { class: "note" }, error.message));
      return;
    }
    this.shown = this.episodes.map((episode) => new Pane(this, episode));
    this.panes.classList.toggle("two", this.shown.length > 1);
    this.panes.replaceChildren(...this.shown.map((pane) => pane.element));
    this.build();
    const span = this.query.get("span");
    const leaf = this.query.get("leaf");
    this.shown.forEach((pane, i) => pane.start(i === 0 && span !== null ? Number(span) : null, i === 0 && leaf !== null ? Number(leaf) : null));
    this.findOthers();
  }

  build() {
    const { run, step, line } = this.place;
    const link = (change, words, name) => make("a", { class: "button", href: `#/episode?${new URLSearchParams({ run, step, line, ...change })}` }, words);
    const colour = choice("colour by", WAYS, way, (chosen) => {
      way = chosen;
      for (const pane of this.shown) pane.transcript.colour(way);
    }, "colour");
    this.colours = colour.querySelector("select");
    this.others = make("span", { class: "others" });
    this.controls.replaceChildren(
      make("a", { class: "button", href: `#/steps?${new URLSearchParams({ run, step })}` }, "all tasks of the step"),
      ...(Number(line) > 0 ? [link({ line: Number(line) - 1 }, "‹ task before")] : []),
      link({ line: Number(line) + 1 }, "next task ›"),
      colour,
      this.others,
    );
  }

  /** Advantage and ratio are greyed where the learner wrote nothing down. */
  learned(reason) {
    for (const option of this.colours.options) {
      if (!["advantage", "ratio"].includes(option.value)) continue;
      option.disabled = Boolean(reason);
      option.title = reason;
      const words = WAYS.find(([name]) => name === option.value)[1];
      option.textContent = reason ? `${words} (not recorded)` : words;
    }
    this.colours.title = reason;
    if (reason && ["advantage", "ratio"].includes(way)) {
      way = this.colours.value = "logprob";
      for (const pane of this.shown) pane.transcript.colour(way);
    }
  }

  /** Where else this task was tried: a choice that puts it beside this one. */
  async findOthers() {
    const { run, step, line } = this.place;
    const task = this.episodes[0].task.id;
    let found;
    for (let tries = 0; tries < 60; tries++) { // a big run is indexed while one waits
      found = await ask("occurrences", { task }).catch(() => null);
      if (!found || !this.panes.isConnected) return;
      if (found.is_complete) break;
    }
    const others = found.found.filter((one) => !(one.run === Number(run) && one.step === step));
    if (!others.length) {
      this.others.replaceChildren(make("span", { class: "note" }, "this task was tried in no other step"));
      return;
    }
    const names = others.map((one) => [`${one.run}:${one.step}:${one.line}`, `${this.state.runs[one.run].name}, step ${one.step} (reward ${number(one.reward, 3)})`]);
    this.others.replaceChildren(choice("compare with", [["", "–"], ...names], this.query.get("with") ?? "", (other) => {
      location.hash = `#/episode?${new URLSearchParams({ run, step, line, ...(other ? { with: other } : {}) })}`;
    }, "with"));
  }

  update() {
    // a written episode does not change
  }

  close() {}
}

class Pane {
  constructor(view, episode) {
    Object.assign(this, { view, episode });
    const { task, leaves, step, run } = episode;
    const name = view.state.runs[run].name;
    const rewards = leaves.map((leaf) => leaf.reward ?? 0);
    const mean = rewards.reduce((a, b) => a + b, 0) / (rewards.length || 1);
    const treeBox = make("div", { class: "treebox" });
    this.walkBox = make("div", { class: "walk" });
    this.chooser = make("div", { class: "controls" });
    const answer = task.answer === null || task.answer === undefined ? null : make("p", { class: "answer" }, "answer: ", make("bdi", {}, visible(String(task.answer))));
    this.element = make("article", { class: "pane", "data-run": run, "data-step": step },
      make("h2", {}, dotOf(colourOf(run)), `${name} · step ${step} · `, make("bdi", {}, oneLine(task.id))),
      make("p", { class: "note" }, `${leaves.length} attempts, mean reward ${number(mean, 3)}, ${episode.num_spans} spans`),
      make("details", { class: "prompt" }, make("summary", {}, "prompt: ", make("bdi", {}, oneLine(task.prompt).slice(0, 100))), make("pre", { dir: "auto" }, visible(task.prompt)), answer),
      treeBox, this.chooser, this.walkBox);
    this.tree = new Tree(treeBox, episode, (span, leaf) => this.choose(span, leaf));
    this.build(null);
  }

  /** What shows the walks of an attempt: one transcript, or the contexts of an agent side by side. */
  build(leaf) {
    const { episode, view, walkBox } = this;
    const learned = (reason) => view.learned(reason);
    if (episode.leaves[leaf]?.contexts.length) {
      if (this.transcript.leaf === leaf) return;
      this.transcript = new Contexts(walkBox, episode, leaf, view.state, { way, learned, go: (...to) => this.read(...to) });
    } else if (!(this.transcript instanceof Transcript)) {
      this.transcript = new Transcript(walkBox, episode, view.state);
      Object.assign(this.transcript, { way, learned });
    }
  }

  start(span, leaf) {
    if (!this.episode.leaves.length) {
      this.transcript.note.textContent = "no attempt was finished";
      return;
    }
    if (span !== null) return this.choose(span);
    this.readFirst(leaf ?? 0);
  }

  readFirst(leaf) {
    this.read(leaf, this.episode.leaves[leaf]?.contexts[0]?.context ?? 0, null);
  }

  choose(span, leaf) {
    const through = this.tree.leavesThrough(span);
    const now = through.find(([number_, context]) => number_ === this.leaf && context === this.context);
    const [number_, context] = leaf ?? now ?? through[0] ?? [0, 0];
    this.read(number_, context, span);
  }

  read(leaf, context, span) {
    [this.leaf, this.context] = [leaf, context];
    const { leaves, spans } = this.episode;
    const path = [];
    for (let at = leaves[leaf].tips[context]; at !== null && at !== undefined; at = spans[at].parent) path.push(at);
    this.tree.mark(path, span);
    const choices = leaves.map((one, i) => [i, `#${i}: ${one.seat ? `seat ${one.seat} of game ${one.match}, ` : ""}reward ${number(one.reward, 3)}, ${one.status}${one.twin !== null && one.twin !== undefined ? `, twin of #${one.twin}` : ""}${sessionWords(one)}`]);
    const { contexts, tips } = leaves[leaf];
    const places = contexts.length ? contexts.map((one) => [one.context, oneLine(one.title)]) : tips.map((_, i) => i);
    this.chooser.replaceChildren(
      choice("attempt", choices, leaf, (chosen) => this.readFirst(Number(chosen)), "leaf"),
      ...(tips.length > 1 ? [choice("context", places, context, (chosen) => this.read(leaf, Number(chosen), null), "context")] : []),
    );
    this.build(leaf);
    this.transcript.open(leaf, context, span);
  }
}

/** What an agent's session counted: contexts, retries, connections that were dropped. */
function sessionWords({ contexts, metrics }) {
  if (!contexts.length) return "";
  const counts = [[metrics.contexts ?? contexts.length, "context", "contexts"], [metrics["agent/retries"], "retry", "retries"], [metrics["agent/dropped"], "dropped connection", "dropped connections"]];
  return counts.map(([count, one, many]) => (count ? `, ${count} ${count === 1 ? one : many}` : "")).join("");
}
