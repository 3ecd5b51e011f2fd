// One walk from root to leaf, token by token. Pages of tokens are fetched as one reads on.

import { ask } from "./api.js";
import { background, legend } from "./colours.js";
import { button, hideTip, make, number, oneLine, showTip, visible } from "./dom.js";
import { MARKS } from "./tree.js";

const PAGE = 1000;
const STRUCTURE = "structure";
const named = (mode) => (mode >= 2 ** 52 ? STRUCTURE : mode); // of a structure a mode is the number of a mask

export class Transcript {
  constructor(box, episode, state) {
    Object.assign(this, { box, episode, state });
    this.way = "author";
    this.tokens = new Map(); // index in the walk -> numbers
    this.note = make("p", { class: "note" });
    this.legend = make("div", { class: "legend" });
    this.text = make("div", { class: "transcript", tabindex: 0, role: "document", "aria-label": "transcript; arrow keys go from token to token" });
    box.replaceChildren(this.note, this.legend, this.text);
    this.text.addEventListener("pointerover", (event) => this.hover(event.target.closest(".t"), event.clientX, event.clientY));
    this.text.addEventListener("pointerleave", hideTip);
    this.text.addEventListener("keydown", (event) => this.press(event));
    this.text.addEventListener("blur", hideTip);
    this.text.addEventListener("scroll", () => this.readOn(), { passive: true });
  }

  /** Read one walk; begins where `span` begins. */
  async open(leaf, context, span = null) {
    const isSame = this.leaf === leaf && this.context === context;
    [this.leaf, this.context, this.span] = [leaf, context, span];
    if (isSame && span !== null) {
      const block = this.text.querySelector(`.span[data-span="${span}"]`);
      if (block) return this.point(block);
    }
    this.generation = (this.generation ?? 0) + 1;
    this.tokens.clear();
    this.text.replaceChildren();
    this.reach = 0;
    const first = await this.fetch(0, 1);
    if (!first) return;
    let begins = 0;
    if (span !== null) {
      for (const [i, length] of first.spans) {
        if (i === span) break;
        begins += length;
      }
    }
    if (begins < 3 * PAGE) begins = 0; // near enough to show what comes before
    this.from = this.to = begins;
    this.total = first.total;
    this.walk = first.spans;
    this.text.dataset.total = first.total;
    if (begins > 0) this.text.append(button(`${begins} tokens before`, () => this.open(leaf, context, null), { class: "earlier" }));
    do await this.more(); while (this.to < this.total && span !== null && !this.text.querySelector(`.span[data-span="${span}"]`));
    const block = this.text.querySelector(`.span[data-span="${span}"]`);
    if (block) this.point(block);
  }

  point(block) {
    for (const other of this.text.querySelectorAll(".span.chosen")) other.classList.remove("chosen");
    block.classList.add("chosen");
    this.text.scrollTop += block.getBoundingClientRect().top - this.text.getBoundingClientRect().top - 8;
  }

  async fetch(start, count) {
    const { run, step, line } = this.episode;
    const generation = this.generation;
    try {
      const found = await ask("tokens", { run, step, line, leaf: this.leaf, context: this.context, start, count });
      return generation === this.generation ? found : null;
    } catch (error) {
      if (generation === this.generation) this.note.textContent = error.message;
      return null;
    }
  }

  async readOn() {
    if (this.isReading || this.to >= this.total) return;
    if (this.text.scrollTop + this.text.clientHeight < this.text.scrollHeight - 600) return;
    await this.more();
  }

  async more() {
    this.isReading = true;
    const page = await this.fetch(this.to, PAGE);
    this.isReading = false;
    if (!page) {
      this.to = this.total;
      return;
    }
    this.note.textContent = [page.no_pieces, ["advantage", "ratio"].includes(this.way) ? page.no_learned : ""].filter(Boolean).join("; ");
    this.noLearned = page.no_learned;
    this.learned?.(page.no_learned);
    const reach = this.reach;
    this.fresh = [];
    let begins = 0;
    for (const [i, length] of page.spans) {
      const [first, last] = [Math.max(begins, page.start), Math.min(begins + length, page.end)];
      const isHere = first < last || (length === 0 && begins >= page.start && begins < page.end);
      if (isHere) this.write(page, i, begins, length, first, last);
      begins += length;
    }
    this.to = page.end;
    this.text.querySelector(".further")?.remove();
    if (this.to < this.total) this.text.append(button(`${this.total - this.to} tokens more`, () => this.more(), { class: "further" }));
    // the scale of advantages grew: all change; else only what is new
    this.paint(this.reach === reach ? this.fresh : undefined);
    requestAnimationFrame(() => this.readOn()); // short tokens may not fill the box
  }

  /** The tokens first..last of one span, into its block. */
  write(page, i, begins, length, first, last) {
    const span = this.episode.spans[i];
    let block = this.text.querySelector(`.span[data-span="${i}"]`);
    if (!block) {
      block = make("section", { class: `span ${span.author}`, "data-span": i }, heading(span, i));
      if (!page.pieces && span.characters) block.append(this.plain(i));
      block.append(make("div", { class: "tokens", dir: "auto" }));
      this.text.append(block, ...(this.below?.(i) ?? []));
    }
    const parts = [];
    let mode = first > begins ? named(this.tokens.get(first - 1)?.mode) : 0;
    for (let at = first; at < last; at++) {
      const token = tokenOf(page, at - page.start, span);
      this.tokens.set(at, token);
      if (token.isTrained && token.advantage !== null) this.reach = Math.max(this.reach, Math.abs(token.advantage));
      const now = named(token.mode);
      if (now !== null && now !== mode) parts.push(make("span", { class: "mode" }, now === STRUCTURE ? now : `m${now}`));
      mode = now;
      if (token.name) parts.push(make("span", { class: "action" }, oneLine(token.name)));
      const kind = span.author === "policy" ? (token.isTrained ? "" : " unmasked") : " other";
      const shown = token.piece === null ? `${token.id} ` : token.piece === "" ? "·" : visible(token.piece, true);
      const element = make("bdi", { class: `t${kind}`, "data-i": at }, shown);
      this.fresh.push(element);
      parts.push(element);
    }
    block.querySelector(".tokens").append(...parts);
  }

  /** The span's own text, where there is no tokenizer to tell what single tokens say. */
  plain(i) {
    const place = make("div", { class: "plain", dir: "auto" });
    const { run, step, line } = this.episode;
    const add = async () => {
      const start = Number(place.dataset.shown ?? 0);
      const found = await ask("text", { run, step, line, span: i, start });
      place.dataset.shown = start + found.text.length;
      place.querySelector("button")?.remove();
      place.append(visible(found.text, true));
      const left = found.total - Number(place.dataset.shown);
      if (left > 0) place.append(button(`${left} characters more`, add));
    };
    add();
    return place;
  }

  colour(way) {
    this.way = way;
    this.note.textContent = ["advantage", "ratio"].includes(way) ? this.noLearned ?? "" : "";
    this.paint();
  }

  paint(elements = this.text.querySelectorAll(".t")) {
    for (const element of elements) {
      element.style.backgroundColor = background(this.way, this.tokens.get(Number(element.dataset.i)), this.reach);
    }
    const marks = legend(this.way, this.reach).map(([words, colour]) => {
      const mark = make("span", { class: "mark" }, words);
      mark.style.backgroundColor = colour;
      return mark;
    });
    this.legend.replaceChildren(...marks, make("span", { class: "mark unmasked" }, "policy, not trained"), make("span", { class: "mark other" }, "not the policy's"));
  }

  hover(element, x, y) {
    if (!element) return hideTip();
    const i = Number(element.dataset.i);
    const token = this.tokens.get(i);
    if (!token) return;
    const rows = [["token", token.id], ["place", i], ["author", token.author]];
    if (token.author === "policy") {
      rows.push(["log-prob", exact(token.logprob)], ["entropy", exact(token.entropy)]);
      rows.push(["advantage", exact(token.advantage)], ["learner's log-prob", exact(token.learner)], ["ratio", exact(token.ratio)]);
      rows.push(["trained", token.isTrained ? "yes" : "no"], ["version", token.version], ["mode", named(token.mode) ?? "–"]);
      if (token.action === -1) rows.push(["action", "none: the tail of an action's text"]);
      else if (token.action !== null && token.action !== token.id) rows.push(["action", `${token.action} ${oneLine(token.name)}`]);
    }
    showTip(x, y, rows, token.piece === null ? "" : JSON.stringify(visible(token.piece)));
  }

  press(event) {
    if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    event.preventDefault();
    const all = [...this.text.querySelectorAll(".t")];
    const now = all.findIndex((element) => element.classList.contains("cursor"));
    const next = all[Math.min(Math.max(now + (event.key === "ArrowRight" ? 1 : -1), 0), all.length - 1)];
    if (!next) return;
    all[now]?.classList.remove("cursor");
    next.classList.add("cursor");
    next.scrollIntoView({ block: "nearest" });
    const box = next.getBoundingClientRect();
    this.hover(next, box.left, box.bottom);
  }
}

function heading(span, i) {
  const facts = [`span ${i}`, `${span.tokens} tokens`];
  if (span.author === "policy") facts.push(`version ${span.version}`);
  if (span.reward) facts.push(`reward ${number(span.reward)}`);
  for (const [name, value] of Object.entries(span.info)) {
    facts.push(`${name.replaceAll("_", " ")} ${oneLine(String(typeof value === "number" ? number(value) : value)).slice(0, 300)}`);
  }
  return make("header", {}, make("b", {}, `${MARKS[span.author] ?? "·"} ${span.author}`), make("span", {}, facts.join(" · ")));
}

function tokenOf(page, i, span) {
  const [logprob, learner] = [page.logprobs[i] ?? null, page.learner[i] ?? null];
  const action = page.actions[i] ?? null;
  const id = page.ids[i];
  return {
    id, logprob, learner, action,
    author: span.author,
    version: span.version,
    piece: page.pieces ? page.pieces[i] : null,
    entropy: page.entropies[i] ?? null,
    isTrained: page.mask[i] === true,
    mode: page.modes[i] ?? null,
    name: action !== null && action !== id && action >= 0 ? page.names[action] ?? `action ${action}` : "",
    advantage: page.advantages[i] ?? null,
    ratio: logprob === null || learner === null ? null : Math.exp(learner - logprob),
  };
}

function exact(value) {
  return value === null ? "–" : value.toFixed(6);
}
