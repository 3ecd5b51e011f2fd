// One attempt in short: the tree of its task, and below what was said on the way to one reward.

import { ask } from "./api.js";
import { make, number, oneLine, visible } from "./dom.js";
import { Tree } from "./tree.js";

const WHO = { task: "Task", policy: "Model", env: "Environment" };
const SHOWN = [3, 4]; // texts at the beginning and at the end of a long attempt

/** `place`: {title, step, line, is_best}; the attempt with the best or the least reward is read. */
export async function showAttempt(run, { title, step, line, is_best }) {
  const episode = await ask("episode", { run, step, line });
  const { spans, leaves, task } = episode;
  const sign = is_best ? 1 : -1;
  const leaf = leaves.reduce((a, b) => (sign * b.reward > sign * a.reward ? b : a));
  const path = [];
  for (let at = leaf.tips.at(-1); at !== null && at !== undefined; at = spans[at].parent) path.unshift(at);
  const address = (more = {}) => `#/episode?${new URLSearchParams({ run, step, line, leaf: leaves.indexOf(leaf), ...more })}`;
  const box = make("div", { class: "treebox" });
  new Tree(box, episode, (span) => (location.hash = address({ span }))).mark(path);
  const mean = leaves.reduce((sum, one) => sum + (one.reward ?? 0), 0) / leaves.length;
  const said = path.map((i) => block(spans[i], i === path[0] ? task.prompt : ""));
  const left = said.length - SHOWN[0] - SHOWN[1];
  if (left > 0) said.splice(SHOWN[0], left, make("p", { class: "note" }, `… ${left} more …`));
  return make("div", { class: "attempt" },
    make("h2", {}, title),
    make("p", { class: "note" }, `Step ${step}, ${leaves.length} attempt${leaves.length === 1 ? "" : "s"} at one task, mean reward ${number(mean, 3)}. `,
      make("a", { href: address() }, "Read it token by token")),
    box, ...said,
    make("p", { class: `earned ${leaf.reward > 0 ? "good" : "bad"}` }, `reward ${number(leaf.reward, 3)}${leaf.status === "done" ? "" : `, ${oneLine(leaf.status)}`}`));
}

function block({ author, text, characters, info }, prompt) {
  const whole = prompt ? prompt.slice(0, 400) : text;
  const mark = (prompt ? prompt.length : characters) > whole.length ? "…" : "";
  const who = info.tool_calls > 0 ? `${WHO[author] ?? author}, calls a tool` : WHO[author] ?? author;
  return make("div", { class: `said ${author}` }, make("b", {}, who), make("bdi", { dir: "auto" }, visible(whole.trim()) + mark || "(nothing)"));
}
