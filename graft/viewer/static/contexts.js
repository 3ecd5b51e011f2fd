// The contexts of one attempt of an agent side by side: a column for each, with the reason why it began.

import { button, make, oneLine } from "./dom.js";
import { Transcript } from "./transcript.js";

export class Contexts {
  /** `go(leaf, context, span)` is called when one goes from a column to another; `learned(reason)` as a Transcript does. */
  constructor(box, episode, leaf, state, { way, go, learned }) {
    Object.assign(this, { leaf, go });
    this.columns = new Map(); // context -> { element, transcript, fresh, isOpen }
    const read = new Set(); // spans of the columns before
    const reasons = new Map();
    const { contexts } = episode.leaves[leaf];
    const titles = new Map(contexts.map((one) => [one.context, oneLine(one.title)]));
    const elements = contexts.map((one) => {
      const walk = make("div", { class: "walk" });
      const after = one.after === null ? null : button(`after span ${one.after} of ${titles.get(one.under)}`, () => go(leaf, one.under, one.after), { class: "origin" });
      const element = make("section", { class: "column", "data-context": one.context, "data-under": one.under, "aria-label": titles.get(one.context) },
        make("h3", {}, titles.get(one.context)),
        make("p", { class: "note" }, `${oneLine(one.reason)}: ${one.words}`, one.is_dropped ? make("b", {}, " The client dropped the connection before the last answer was complete; it is not trained.") : null, after),
        one.change ? make("p", { class: "change" }, `${oneLine(one.change.place)}, before: `, make("bdi", {}, oneLine(one.change.before)), make("br"), "after: ", make("bdi", {}, oneLine(one.change.after))) : null,
        walk);
      const transcript = new Transcript(walk, episode, state);
      transcript.way = way;
      transcript.learned = (reason) => {
        reasons.set(one.context, reason);
        learned([...reasons.values()].every(Boolean) ? reason : "");
      };
      transcript.below = (span) => contexts.filter((other) => other.under === one.context && other.after === span).map((other) =>
        button(`↳ ${titles.get(other.context)} (${oneLine(other.reason)})`, () => go(leaf, other.context, null), { class: "follower", "data-context": other.context }));
      const path = [];
      for (let at = episode.leaves[leaf].tips[one.context]; at !== null && at !== undefined; at = episode.spans[at]?.parent) path.unshift(at);
      const fresh = read.size ? path.find((span) => !read.has(span)) ?? null : null; // the rest is in another column
      for (const span of path) read.add(span);
      this.columns.set(one.context, { element, transcript, fresh, isOpen: false });
      return element;
    });
    this.box = make("div", { class: `columns${elements.length > 1 ? "" : " one"}`, tabindex: 0, "aria-label": "contexts of the attempt, side by side" }, ...elements);
    box.replaceChildren(this.box);
    // tokens are fetched when a column is first seen: an agent may have dozens
    this.seen = new IntersectionObserver((changes) => {
      for (const change of changes) if (change.isIntersecting) this.begin(Number(change.target.dataset.context));
    }, { root: this.box, rootMargin: "0px 200px" });
    for (const element of elements) this.seen.observe(element);
  }

  begin(context, span = null) {
    const column = this.columns.get(context);
    if (column.isOpen && span === null) return;
    column.isOpen = true;
    column.transcript.open(this.leaf, context, span ?? column.fresh);
  }

  open(leaf, context, span) {
    for (const [number, { element }] of this.columns) element.classList.toggle("chosen", number === context);
    const { element } = this.columns.get(context);
    this.box.scrollLeft += element.getBoundingClientRect().left - this.box.getBoundingClientRect().left - 8;
    this.begin(context, span);
  }

  colour(way) {
    for (const { transcript } of this.columns.values()) transcript.colour(way);
  }
}
