// How tokens are coloured: each way gives a background for the numbers of one token, and a legend.

import { number } from "./dom.js";

const AUTHORS = { task: "120, 130, 140", policy: "42, 120, 214", env: "214, 150, 20" };
const FULL = { logprob: 6, entropy: 3, ratio: 0.3 };

export const WAYS = [
  ["author", "author"], ["logprob", "log-prob"], ["entropy", "entropy"], ["advantage", "advantage"],
  ["ratio", "ratio"], ["version", "version"], ["none", "nothing"],
];

/** The background of a token, "" for none. `reach` is the largest advantage of the walk. */
export function background(way, token, reach) {
  if (way === "author") return `rgba(${AUTHORS[token.author] ?? "120, 130, 140"}, ${token.author === "policy" ? 0.3 : 0.2})`;
  if (way === "version") return token.author === "policy" ? `hsla(${(token.version * 67) % 360}, 70%, 50%, 0.35)` : "";
  if (way === "logprob") return token.logprob === null ? "" : one("224, 96, 20", -token.logprob / FULL.logprob);
  if (way === "entropy") return token.entropy === null ? "" : one("150, 70, 210", token.entropy / FULL.entropy);
  if (way === "advantage") return token.advantage === null || !token.isTrained ? "" : two(token.advantage / (reach || 1));
  if (way === "ratio") return token.ratio === null ? "" : two(Math.log(token.ratio) / FULL.ratio);
  return "";
}

export function legend(way, reach) {
  if (way === "author") return [["task", rgba(AUTHORS.task, 0.2)], ["policy", rgba(AUTHORS.policy, 0.3)], ["env, tools", rgba(AUTHORS.env, 0.2)]];
  if (way === "logprob") return [0, -1, -3, -6].map((value) => [number(value), one("224, 96, 20", -value / FULL.logprob)]);
  if (way === "entropy") return [0, 0.5, 1.5, 3].map((value) => [number(value), one("150, 70, 210", value / FULL.entropy)]);
  if (way === "advantage") return [-1, -0.3, 0, 0.3, 1].map((share) => [number(share * (reach || 1), 2), two(share)]);
  if (way === "ratio") return [0.75, 0.9, 1, 1.1, 1.35].map((value) => [number(value), two(Math.log(value) / FULL.ratio)]);
  return [];
}

function one(colour, share) {
  return rgba(colour, 0.75 * Math.min(Math.max(share, 0), 1));
}

/** Blue above, red below. */
export function two(share) {
  const size = 0.75 * Math.min(Math.abs(share), 1);
  return rgba(share >= 0 ? "20, 110, 220" : "214, 40, 40", size);
}

function rgba(colour, alpha) {
  return `rgba(${colour}, ${alpha.toFixed(3)})`;
}
