// An episode drawn as a tree: spans from left to right, forks where they happened, rewards at the leaves.

import { draw, hideTip, number, oneLine, showTip } from "./dom.js";

const COLUMN = 152;
const ROW = 36;
const TOP = 14; // room for the mark of a tool above the first row
const BOX = { width: 106, height: 22 };
const MOST_LEAVES = 400; // drawn at first; the rest on demand

export const MARKS = { task: "◆", policy: "●", env: "■" };

/** Where everything goes: a column per depth, a row per tip; a parent is centred on its children. */
export function layOut(episode) {
  const { spans, leaves } = episode;
  const children = spans.map(() => []);
  const roots = [];
  spans.forEach((span, i) => (span.parent === null ? roots : children[span.parent]).push(i));
  const ends = spans.map(() => []); // span -> [leaf, context] that end there
  leaves.forEach((leaf, number) => leaf.tips.forEach((tip, context) => ends[tip]?.push([number, context])));
  const depth = spans.map(() => 0);
  spans.forEach((span, i) => { if (span.parent !== null) depth[i] = depth[span.parent] + 1; });
  const row = spans.map(() => null);
  let rows = 0;
  const stack = roots.toReversed();
  while (stack.length) { // in the order one reads: down each branch first
    const i = stack.pop();
    if (!children[i].length) row[i] = rows++;
    else {
      if (ends[i].length) row[i] = -(rows++) - 1; // an attempt ends here and others go on: keep a row
      stack.push(...children[i].toReversed());
    }
  }
  const own = row.slice();
  for (let i = spans.length - 1; i >= 0; i--) { // children come after their parents
    if (!children[i].length) continue;
    const below = children[i].map((child) => row[child]);
    row[i] = (Math.min(...below) + Math.max(...below)) / 2;
  }
  const kept = own.map((value) => (value !== null && value < 0 ? -value - 1 : null));
  return { children, ends, depth, row, kept, rows, columns: Math.max(0, ...depth) + 1 };
}

/** What made a span's children several: the entropy that was recorded, a forced decision, or samples. */
export function forkOf(episode, children, i) {
  if (children[i].length < 2) return null;
  const below = children[i].map((child) => episode.spans[child]);
  const cause = below.find((span) => span.info.forks > 0 && typeof span.info.entropy_change === "number")
    ?? (episode.spans[i].info.forks > 0 ? episode.spans[i] : undefined)
    ?? (episode.spans[episode.spans[i].parent]?.info.forks > 0 ? episode.spans[episode.spans[i].parent] : undefined);
  if (cause && typeof cause.info.entropy_change === "number") {
    const change = cause.info.entropy_change;
    return { words: `ΔH ${change >= 0 ? "+" : ""}${change.toFixed(2)}`, kind: "entropy", change };
  }
  const forced = below.find((span) => span.info.forced !== undefined);
  if (forced) return { words: `twin: ${oneLine(String(forced.info.forced)).slice(0, 14)}`, kind: "twin" };
  return { words: `${children[i].length} ways`, kind: "samples" };
}

export class Tree {
  /** `choose(span, leaf)` is called when a branch is clicked. */
  constructor(box, episode, choose) {
    Object.assign(this, { box, episode, choose });
    this.plan = layOut(episode);
    this.isWhole = episode.leaves.length <= MOST_LEAVES;
    this.build();
  }

  build() {
    const { spans, leaves } = this.episode;
    const { children, ends, depth, row, kept, rows, columns } = this.plan;
    const shownRows = this.isWhole ? rows : MOST_LEAVES;
    const width = columns * COLUMN + 190;
    const height = shownRows * ROW + TOP;
    const at = (i) => [8 + depth[i] * COLUMN, TOP + row[i] * ROW];
    const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "tree", "aria-label": "episode tree", class: "tree" });
    const edges = draw("g", { class: "edges" });
    const nodes = draw("g", {});
    svg.append(edges, nodes);
    this.nodes = spans.map(() => null);
    spans.forEach((span, i) => {
      if (row[i] >= shownRows) return;
      const [x, y] = at(i);
      const middle = y + BOX.height / 2;
      for (const child of children[i]) {
        if (row[child] >= shownRows) continue;
        const [toX, toY] = at(child);
        const bend = x + BOX.width + 36;
        edges.append(draw("path", { d: `M${x + BOX.width} ${middle}H${bend}V${toY + BOX.height / 2}H${toX}`, "data-to": child }));
      }
      const words = `${MARKS[span.author] ?? "·"} ${oneLine(span.text) || `${span.tokens} tokens`}`;
      const calls = span.info.tool_calls > 0 ? draw("text", { x: x + BOX.width - 4, y: y - 2, class: "call" }, `⚒${span.info.tool_calls > 1 ? span.info.tool_calls : ""}`) : null;
      const node = draw("g", { class: `node ${span.author}${span.info.error ? " error" : ""}`, tabindex: i === 0 ? 0 : -1, role: "treeitem", "data-span": i, "aria-level": depth[i] + 1, "aria-label": `${span.author}, ${span.tokens} tokens: ${oneLine(span.text).slice(0, 80)}` },
        draw("rect", { x, y, width: BOX.width, height: BOX.height, rx: 5 }),
        draw("text", { x: x + 6, y: y + 15, class: "words" }, clipped(words, 15)),
        calls);
      nodes.append(node);
      this.nodes[i] = node;
      const fork = forkOf(this.episode, children, i);
      if (fork) {
        const label = draw("g", { class: `fork ${fork.kind}`, "data-span": i },
          draw("circle", { cx: x + BOX.width + 36, cy: middle, r: 4 }),
          draw("text", { x: x + BOX.width + 32, y: y + BOX.height + 9 }, fork.words));
        nodes.append(label);
      }
      ends[i].forEach(([leaf, context], place) => {
        const low = kept[i] !== null && children[i].length ? TOP + kept[i] * ROW : y;
        nodes.append(this.leaf(leaf, context, i, x + BOX.width + (children[i].length ? 24 : 12) + place * 60, low));
      });
    });
    svg.addEventListener("click", (event) => this.click(event));
    svg.addEventListener("keydown", (event) => this.press(event));
    svg.addEventListener("pointerover", (event) => this.hover(event));
    svg.addEventListener("pointerleave", hideTip);
    this.box.replaceChildren(svg);
    if (!this.isWhole) {
      const more = document.createElement("button");
      more.textContent = `draw all ${leaves.length} attempts`;
      more.addEventListener("click", () => { this.isWhole = true; this.build(); });
      this.box.append(more);
    }
  }

  leaf(number_, context, span, x, y) {
    const leaf = this.episode.leaves[number_];
    const isLast = context === leaf.tips.length - 1;
    const twin = leaf.twin !== null && leaf.twin !== undefined ? ` ⇄${leaf.twin}` : "";
    const titled = leaf.contexts.find((one) => one.context === context);
    const words = isLast ? `#${number_} ${leaf.seat ? `${leaf.seat} ` : ""}${number(leaf.reward, 3)}${leaf.status === "done" ? "" : ` ${leaf.status}`}${twin}` : `#${number_} ${titled ? oneLine(titled.title).slice(0, 24) : `context ${context + 2}`}`;
    const isGood = leaf.reward > 0 ? "good" : leaf.reward < 0 ? "bad" : "zero";
    return draw("g", { class: `leaf ${isGood}`, "data-leaf": number_, "data-context": context, "data-span": span },
      draw("rect", { x: x - 4, y: y + 2, width: words.length * 6.6 + 8, height: BOX.height - 4, rx: 9 }),
      draw("text", { x, y: y + 15 }, words));
  }

  /** Leaves whose way leads through a span. */
  leavesThrough(span) {
    return this.episode.leaves.flatMap((leaf, number_) =>
      leaf.tips.flatMap((tip, context) => {
        let at = tip;
        while (at !== null && at > span) at = this.episode.spans[at].parent;
        return at === span ? [[number_, context]] : [];
      }));
  }

  click(event) {
    const found = event.target.closest("[data-span]");
    if (!found) return;
    const span = Number(found.dataset.span);
    const leaf = found.dataset.leaf === undefined ? undefined : [Number(found.dataset.leaf), Number(found.dataset.context)];
    this.choose(span, leaf);
  }

  press(event) {
    const node = event.target.closest(".node");
    if (!node) return;
    const span = Number(node.dataset.span);
    const { children } = this.plan;
    const parent = this.episode.spans[span].parent;
    const beside = parent === null ? this.episode.spans.flatMap((s, i) => (s.parent === null ? [i] : [])) : children[parent];
    const place = beside.indexOf(span);
    const to = { ArrowLeft: parent, ArrowRight: children[span][0], ArrowUp: beside[place - 1], ArrowDown: beside[place + 1] };
    if (event.key === "Enter" || event.key === " ") this.choose(span);
    else if (event.key in to) {
      const next = this.nodes[to[event.key]];
      if (next) {
        node.setAttribute("tabindex", -1);
        next.setAttribute("tabindex", 0);
        next.focus();
      }
    } else return;
    event.preventDefault();
  }

  hover(event) {
    const found = event.target.closest("[data-span]");
    if (!found) return hideTip();
    const span = this.episode.spans[Number(found.dataset.span)];
    const rows = [["span", found.dataset.span], ["author", span.author], ["tokens", span.tokens]];
    if (span.author === "policy") rows.push(["trained", span.trained], ["entropy, mean", number(span.entropy)], ["log-prob, mean", number(span.logprob)], ["version", span.version]);
    if (span.reward) rows.push(["reward here", number(span.reward)]);
    for (const [name, value] of Object.entries(span.info)) rows.push([name, oneLine(String(typeof value === "number" ? number(value) : value)).slice(0, 200)]);
    if (found.dataset.leaf !== undefined) {
      const leaf = this.episode.leaves[Number(found.dataset.leaf)];
      rows.push(["leaf", found.dataset.leaf], ["reward", number(leaf.reward)], ["status", leaf.status]);
      if (leaf.twin !== null && leaf.twin !== undefined) rows.push(["twin", leaf.twin]);
      if (leaf.seat) rows.push(["seat", leaf.seat], ["game", leaf.match]);
      const began = leaf.contexts.find((one) => one.context === Number(found.dataset.context));
      if (began) rows.push(["context", oneLine(began.title)], ["began", oneLine(began.reason)]);
      for (const [name, value] of Object.entries(leaf.metrics)) rows.push([name, number(value)]);
      for (const [name, value] of Object.entries(leaf.info)) rows.push([`info: ${name}`, oneLine(String(value)).slice(0, 200)]);
    }
    showTip(event.clientX, event.clientY, rows, oneLine(span.text).slice(0, 160));
  }

  /** Mark the way of the walk that is read. */
  mark(path, span) {
    const on = new Set(path);
    this.nodes.forEach((node, i) => {
      node?.classList.toggle("on", on.has(i));
      node?.classList.toggle("chosen", i === span);
    });
    for (const edge of this.box.querySelectorAll(".edges path")) edge.classList.toggle("on", on.has(Number(edge.dataset.to)));
  }
}

function clipped(words, most) {
  const letters = [...words];
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : words;
}
