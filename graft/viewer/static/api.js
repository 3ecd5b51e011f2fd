// Questions to the server: names and numbers in, JSON out.

import { answer, saved } from "./saved.js";

export async function ask(what, query = {}) {
  if (saved) return answer(what, query);
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== "");
  const response = await fetch(`/api/${what}?${new URLSearchParams(given)}`, {
    signal: AbortSignal.timeout(60_000),
  });
  if (!response.ok) throw new Error((await response.text()).trim() || `status ${response.status}`);
  return response.json();
}

export const COLOURS = ["#2a78d6", "#e0602b", "#1c9a6c", "#9b57d3", "#c99a06", "#d6438a", "#5b8a9a", "#7a6a58"];

export function colourOf(run) {
  return COLOURS[run % COLOURS.length];
}
