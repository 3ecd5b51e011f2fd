// An episode drawn as a tree: spans from left to right, forks where they happened, rewards at the leaves.

import { button, draw, hideTip, number, oneLine, showTip } from "./dom.js";

const GAP = 48; // between columns
const ROW = 36;
const TOP = 14; // room for the mark of a tool above the first row
const BOX = { width: 170, height: 22 }; // at most; a column is as wide as its texts
const FONT = "11px system-ui, sans-serif"; // as .tree in style.css
const MOST_LEAVES = 400; // drawn at first; the rest on demand

export const MARKS = { task: "◆", policy: "●", env: "■" };

/** Where everything goes: a column per depth, a row per tip; a parent is centred on its children.
 *  Of branches that say and earn the same, `isFolded` keeps the first: `same` has that one's span for every other. */
export function layOut(episode, isFolded = false) {
  const { spans, leaves } = episode;
  const children = spans.map(() => []);
  const roots = [];
  spans.forEach((span, i) => (span.parent === null ? roots : children[span.parent]).push(i));
  const ends = spans.map(() => []); // span -> [leaf, context] that end there
  leaves.forEach((leaf, number) => leaf.tips.forEach((tip, context) => ends[tip]?.push([number, context])));
  const same = spans.map((_, i) => i);
  const times = leaves.map(() => 1);
  if (isFolded) fold(episode, children, ends, same, times);
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
  return { children, ends, depth, row, kept, rows, same, times, columns: Math.max(0, ...depth) + 1 };
}

/** Take equal branches out of `children`, and count the attempts that go with the first of them. */
function fold({ spans, leaves }, children, ends, same, times) {
  const known = new Map();
  const kinds = spans.map(() => 0); // equal numbers: equal branches
  for (let i = spans.length - 1; i >= 0; i--) { // children come after their parents
    const { author, text, characters, tokens, logprob, info } = spans[i];
    const rest = characters > text.length ? logprob : 0; // a longer text is known by its beginning and its numbers
    const earned = ends[i].map(([leaf, context]) => {
      const { reward, status, twin, seat, contexts } = leaves[leaf];
      return [reward, status, twin, seat, context, contexts.length ? leaf : 0];
    });
    const did = [info.error, info.forced, info.forks, info.tool_calls];
    const kind = JSON.stringify([author, text, characters, tokens, rest, did, earned, children[i].map((child) => kinds[child])]);
    if (!known.has(kind)) known.set(kind, known.size);
    kinds[i] = known.get(kind);
  }
  const merge = (pairs) => { // of spans with the same form below them
    while (pairs.length) {
      const [first, other] = pairs.pop();
      same[other] = first;
      ends[other].forEach(([leaf], n) => {
        times[ends[first][n][0]] += times[leaf];
        times[leaf] = 0;
      });
      pairs.push(...children[other].map((child, n) => [children[first][n], child]));
    }
  };
  const pending = spans.flatMap((span, i) => (span.parent === null ? [i] : []));
  while (pending.length) {
    const i = pending.pop();
    const firsts = new Map();
    for (const child of children[i]) {
      if (firsts.has(kinds[child])) merge([[firsts.get(kinds[child]), child]]);
      else firsts.set(kinds[child], child);
    }
    children[i] = [...firsts.values()];
    pending.push(...children[i]);
  }
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
    this.isFolded = true;
    this.isWhole = episode.leaves.length <= MOST_LEAVES;
    this.build();
  }

  build() {
    const { spans, leaves } = this.episode;
    this.plan = layOut(this.episode, this.isFolded);
    const { children, ends, depth, row, kept, rows, same, columns } = this.plan;
    const shownRows = this.isWhole ? rows : Math.min(rows, MOST_LEAVES);
    const texts = spans.map((span) => fitted(`${MARKS[span.author] ?? "·"} ${oneLine(span.text) || `${span.tokens} tokens`}`, BOX.width - 12));
    const widths = Array(columns).fill(0);
    spans.forEach((_, i) => { if (same[i] === i) widths[depth[i]] = Math.max(widths[depth[i]], widthOf(texts[i]) + 12); });
    const lefts = widths.map(() => 8);
    widths.forEach((own, i) => { lefts[i + 1] = lefts[i] + own + GAP; });
    let width = lefts.pop();
    const height = shownRows * ROW + TOP;
    const at = (i) => [lefts[depth[i]], TOP + row[i] * ROW];
    const svg = draw("svg", { role: "tree", "aria-label": "episode tree", class: "tree" });
    const edges = draw("g", { class: "edges" });
    const nodes = draw("g", {});
    svg.append(edges, nodes);
    this.nodes = spans.map(() => null);
    spans.forEach((span, i) => {
      if (row[i] >= shownRows || same[i] !== i) return;
      const [x, y] = at(i);
      const middle = y + BOX.height / 2;
      const right = x + widths[depth[i]];
      for (const child of children[i]) {
        if (row[child] >= shownRows) continue;
        const [toX, toY] = at(child);
        edges.append(draw("path", { d: `M${right} ${middle}H${right + 36}V${toY + BOX.height / 2}H${toX}`, "data-to": child }));
      }
      const calls = span.info.tool_calls > 0 ? draw("text", { x: right - 4, y: y - 2, class: "call" }, `⚒${span.info.tool_calls > 1 ? span.info.tool_calls : ""}`) : null;
      const node = draw("g", { class: `node ${span.author}${span.info.error ? " error" : ""}`, tabindex: i === 0 ? 0 : -1, role: "treeitem", "data-span": i, "aria-level": depth[i] + 1, "aria-label": `${span.author}, ${span.tokens} tokens: ${oneLine(span.text).slice(0, 80)}` },
        draw("rect", { x, y, width: widths[depth[i]], height: BOX.height, rx: 5 }),
        draw("text", { x: x + 6, y: y + 15, class: "words" }, texts[i]),
        calls);
      nodes.append(node);
      this.nodes[i] = node;
      const fork = forkOf(this.episode, children, i);
      if (fork) {
        const label = draw("g", { class: `fork ${fork.kind}`, "data-span": i },
          draw("circle", { cx: right + 36, cy: middle, r: 4 }),
          draw("text", { x: right + 32, y: y + BOX.height + 9 }, fork.words));
        nodes.append(label);
      }
      const low = kept[i] !== null && children[i].length ? TOP + kept[i] * ROW : y;
      let end = right + (children[i].length ? 24 : 12);
      for (const [leaf, context] of ends[i]) {
        const words = this.wordsOf(leaf, context);
        nodes.append(this.leaf(leaf, context, i, end, low, words));
        end += widthOf(words) + 14;
        width = Math.max(width, end);
      }
    });
    for (const [name, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` })) svg.setAttribute(name, value);
    svg.addEventListener("click", (event) => this.click(event));
    svg.addEventListener("keydown", (event) => this.press(event));
    svg.addEventListener("pointerover", (event) => this.hover(event));
    svg.addEventListener("pointerleave", hideTip);
    this.box.replaceChildren(svg);
    const folded = this.plan.times.filter((count) => !count).length;
    const redraw = (words, change) => this.box.append(button(words, () => { Object.assign(this, change); this.build(); this.mark(this.path, this.span); }, { class: "redraw" }));
    if (folded) redraw(`unfold ${folded} equal attempt${folded > 1 ? "s" : ""}`, { isFolded: false });
    if (shownRows < rows) redraw(`draw all ${leaves.length} attempts`, { isWhole: true });
  }

  wordsOf(number_, context) {
    const leaf = this.episode.leaves[number_];
    if (context < leaf.tips.length - 1) {
      const titled = leaf.contexts.find((one) => one.context === context);
      return `#${number_} ${titled ? oneLine(titled.title).slice(0, 24) : `context ${context + 2}`}`;
    }
    const twin = leaf.twin !== null && leaf.twin !== undefined ? ` ⇄${leaf.twin}` : "";
    const count = this.plan.times[number_];
    return `#${number_} ${leaf.seat ? `${leaf.seat} ` : ""}${number(leaf.reward, 3)}${leaf.status === "done" ? "" : ` ${leaf.status}`}${twin}${count > 1 ? ` ×${count}` : ""}`;
  }

  leaf(number_, context, span, x, y, words) {
    const leaf = this.episode.leaves[number_];
    const isGood = leaf.reward > 0 ? "good" : leaf.reward < 0 ? "bad" : "zero";
    return draw("g", { class: `leaf ${isGood}`, "data-leaf": number_, "data-context": context, "data-span": span },
      draw("rect", { x: x - 4, y: y + 2, width: widthOf(words) + 8, height: BOX.height - 4, rx: 9 }),
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
      if (this.plan.times[found.dataset.leaf] > 1) rows.push(["equal attempts", this.plan.times[found.dataset.leaf]]);
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
  mark(path = [], span = null) {
    Object.assign(this, { path, span });
    const { same } = this.plan;
    const on = new Set(path.map((i) => same[i]));
    this.nodes.forEach((node, i) => {
      node?.classList.toggle("on", on.has(i));
      node?.classList.toggle("chosen", span !== null && i === same[span]);
    });
    for (const edge of this.box.querySelectorAll(".edges path")) edge.classList.toggle("on", on.has(Number(edge.dataset.to)));
  }
}

const pen = document.createElement("canvas").getContext("2d");

function widthOf(words) {
  pen.font = FONT;
  return pen.measureText(words).width;
}

/** As many letters as fit into a width, with a mark if some are missing. */
function fitted(words, width) {
  if (widthOf(words) <= width) return words;
  const letters = [...words];
  let [fits, fails] = [0, letters.length];
  while (fails - fits > 1) {
    const middle = (fits + fails) >> 1;
    if (widthOf(`${letters.slice(0, middle).join("")}…`) <= width) fits = middle;
    else fails = middle;
  }
  return `${letters.slice(0, fits).join("")}…`;
}
