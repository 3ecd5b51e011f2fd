// The view of one step: its tasks as a table of any length, and words found in transcripts.

import { ask } from "./api.js";
import { button, choice, make, number, oneLine } from "./dom.js";
import { VirtualList } from "./virtual.js";

const ROW = 32;
const COLUMNS = [
  ["line", "#", "number"],
  ["task", "task", "words"],
  ["reward", "reward", "number"],
  ["best", "best", "number"],
  ["spread", "spread", "number"],
  ["attempts", "attempts", "number"],
  ["length", "tokens", "number"],
  ["turns", "turns", "number"],
  ["tools", "tools", "number"],
  ["status", "status", "words"],
];
const SCOPES = [["tasks", "in tasks"], ["step", "in transcripts of this step"], ["all", "in transcripts of all steps"]];

export class Steps {
  constructor(main, state, query) {
    Object.assign(this, { main, state });
    const withEpisodes = state.runs.find((run) => run.episodes.length) ?? state.runs[0];
    this.run = Number(query.get("run") ?? withEpisodes.run);
    this.step = query.get("step") ?? this.info.episodes.filter((s) => !s.startsWith("failed")).at(-1) ?? "";
    this.sort = query.get("sort") ?? "line";
    this.isFalling = query.get("order") === "falling";
    this.status = "";
    this.words = "";
    this.scope = "tasks";
    this.controls = make("div", { class: "controls" });
    this.note = make("p", { class: "note", role: "status" });
    this.head = make("div", { class: "tasks head", role: "row" });
    this.box = make("div", { class: "list", role: "grid", "aria-label": "tasks of the step" });
    this.hits = make("div", { class: "hits", hidden: true });
    main.replaceChildren(this.controls, this.note, this.hits, this.head, this.box);
    this.build();
    if (this.step === "") {
      this.note.textContent = "no episodes yet: they are written with each step of the phase rl (run.log_episodes)";
      return;
    }
    this.list = new VirtualList(this.box, ROW, {
      fetchPage: (start, count) => this.fetch(start, count),
      makeRow: () => make("div", { class: "tasks row", role: "row" }, ...COLUMNS.map(([name, , kind]) => make("span", { class: `${name} ${kind}`, role: "gridcell" }))),
      fillRow,
      open: (row) => { location.hash = `#/episode?${new URLSearchParams({ run: this.run, step: this.step, line: row.line })}`; },
    });
    this.list.failed = (error) => (this.note.textContent = error.message);
  }

  get info() {
    return this.state.runs.find((run) => run.run === this.run) ?? this.state.runs[0];
  }

  build() {
    const steps = this.info.episodes;
    const at = steps.indexOf(this.step);
    const go = (step) => step !== undefined && this.go({ step });
    const search = make("input", {
      type: "search", name: "words", placeholder: "search", "aria-label": "search", value: this.words,
      on: {
        input: () => { if (this.scope === "tasks") this.find(search.value); },
        keydown: (event) => { if (event.key === "Enter") this.find(search.value); },
      },
    });
    this.follow = make("input", { type: "checkbox", name: "follow", checked: at === steps.length - 1 });
    this.controls.replaceChildren(
      ...(this.state.runs.length > 1 ? [choice("run", this.state.runs.map((run) => [run.run, run.name]), this.run, (run) => this.go({ run, step: null }), "run")] : []),
      button("‹", () => go(steps[at - 1]), { "aria-label": "step before", disabled: at <= 0 }),
      choice("step", steps, this.step, go, "step"),
      button("›", () => go(steps[at + 1]), { "aria-label": "next step", disabled: at < 0 || at >= steps.length - 1 }),
      make("label", {}, this.follow, " follow"),
      make("span", { class: "statuses" }),
      search,
      choice("", SCOPES, this.scope, (scope) => { this.scope = scope; this.find(search.value); }, "scope"),
    );
    this.head.replaceChildren(...COLUMNS.map(([name, words, kind]) => {
      const mark = this.sort === name ? (this.isFalling ? " ↓" : " ↑") : "";
      const order = this.sort === name ? (this.isFalling ? "descending" : "ascending") : "none";
      return make("span", { class: `${name} ${kind}`, role: "columnheader", "aria-sort": order }, button(words + mark, () => this.sortBy(name), { "data-sort": name }));
    }));
  }

  go({ run = this.run, step = this.step }) {
    const query = new URLSearchParams({ run, sort: this.sort, order: this.isFalling ? "falling" : "rising" });
    if (step !== null) query.set("step", step);
    location.hash = `#/steps?${query}`;
  }

  sortBy(name) {
    // numbers are asked for from the largest, unless one asks twice
    const isNumber = !["line", "task"].includes(name);
    this.isFalling = this.sort === name ? !this.isFalling : isNumber;
    this.sort = name;
    this.build();
    this.showStatuses();
    this.list?.reset();
  }

  async fetch(start, count) {
    const found = await ask("tasks", {
      run: this.run, step: this.step, start, count, sort: this.sort,
      order: this.isFalling ? "falling" : "rising", status: this.status,
      words: this.scope === "tasks" ? this.words : "",
    });
    this.known = found.statuses;
    this.showStatuses();
    const part = found.indexed < 1 ? `, reading the file: ${Math.floor(100 * found.indexed)} %` : "";
    this.note.textContent = `${found.total} of ${found.lines} tasks${part}`;
    this.note.dataset.total = found.total;
    if (found.indexed < 1) setTimeout(() => this.list?.refresh(), 100);
    return found;
  }

  showStatuses() {
    const place = this.controls.querySelector(".statuses");
    const wanted = JSON.stringify([this.known, this.status]);
    if (!this.known || place.dataset.shown === wanted) return;
    place.dataset.shown = wanted;
    place.replaceChildren(choice("status", [["", "any"], ...this.known], this.status, (status) => {
      this.status = status;
      this.list.reset();
    }, "status"));
  }

  find(words) {
    this.words = words.trim();
    this.hits.hidden = this.scope === "tasks" || !this.words;
    this.hits.replaceChildren();
    if (this.scope === "tasks") this.list?.reset();
    else if (this.words) this.search({ step: this.step });
  }

  /** Asks on until there are enough hits to look at, or nothing is left to read. */
  async search(from, many = 0) {
    const [words, scope] = [this.words, this.scope];
    this.hits.querySelector("button")?.remove();
    this.note.textContent = `searching for “${words}” …`;
    let [hits, next] = [many, from];
    do {
      let found;
      try {
        found = await ask("search", { run: this.run, step: this.step, words, all: scope === "all" ? 1 : "", ...next });
      } catch (error) {
        this.note.textContent = error.message;
        return;
      }
      if (words !== this.words || scope !== this.scope || !this.hits.isConnected) return;
      this.hits.append(...found.hits.map((hit) => this.hit(hit)));
      hits += found.hits.length;
      next = found.next && { from: found.next[0], line: found.next[1] };
      this.note.textContent = `${hits} found${next ? `, read up to step ${next.from}, task ${next.line}` : ""}`;
    } while (next && hits - many < 50);
    if (next) this.hits.append(button("search on", () => this.search(next, hits)));
  }

  hit(hit) {
    const query = new URLSearchParams({ run: this.run, step: hit.step, line: hit.line, span: hit.span });
    return make("a", { href: `#/episode?${query}`, class: "hit" },
      make("span", { class: "where" }, `step ${hit.step} · ${oneLine(hit.task)}`),
      make("bdi", {}, oneLine(hit.before), make("mark", {}, oneLine(hit.match)), oneLine(hit.after)));
  }

  update() {
    const newest = this.info.episodes.at(-1);
    if (this.follow?.checked && newest && newest !== this.step && !newest.startsWith("failed")) return this.go({ step: newest });
    const chosen = document.activeElement?.name;
    this.build();
    this.showStatuses();
    if (chosen) this.controls.querySelector(`[name="${chosen}"]`)?.focus();
    this.list?.refresh();
  }

  close() {
    this.list?.close();
  }
}

function fillRow(element, row) {
  const cells = element.children;
  if (!row) {
    for (const cell of cells) cell.textContent = "";
    cells[1].textContent = "…";
    return;
  }
  const statuses = Object.entries(row.statuses).map(([name, many]) => (many === row.attempts ? name : `${many} ${name}`));
  const texts = [
    row.line, `${row.task}  ${row.prompt}`, number(row.reward, 3), number(row.best, 3), number(row.spread, 3), row.attempts,
    number(row.tokens, 3), number(row.turns, 3), number(row.tools, 3), row.fault || statuses.join(", "),
  ];
  texts.forEach((text, i) => (cells[i].textContent = typeof text === "string" ? oneLine(text) : text));
  element.classList.toggle("fault", Boolean(row.fault));
}
