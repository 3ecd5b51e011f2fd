// A page saved as one file: the answers that a server would give, from the data in the page itself.

const element = document.getElementById("saved");
export const saved = element ? JSON.parse(element.textContent) : null;

const NUMBERS = { line: "line", reward: "reward", best: "best", spread: "spread", attempts: "attempts", length: "tokens", turns: "turns", tools: "tools" };

const ANSWERS = {
  runs: () => ({ runs: saved.runs }),
  pulse: () => ({}),
  explain: () => saved.explain,
  settings: () => saved.settings,
  summary: ({ run }) => saved.summary[run],
  curves: ({ run, phase, metrics }) => {
    const found = saved.curves[run][phase] ?? { step: [], seconds: [], wall: [], values: {} };
    return { ...found, values: only(found.values, metrics) };
  },
  band: ({ runs, phase, metrics }) => only(saved.band[runs]?.[phase] ?? {}, metrics),
  tasks: ({ run, step, start = 0, count = 100, sort, order, status, words }) => {
    const all = stepOf(run, step).rows;
    const found = all.filter((row) => (!status || status in row.statuses) && (!words || `${row.task} ${row.prompt}`.toLowerCase().includes(words.toLowerCase())));
    const key = (row) => (NUMBERS[sort] ? row[NUMBERS[sort]] : sort === "status" ? Object.keys(row.statuses).join() : row.task);
    found.sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * (order === "falling" ? -1 : 1));
    const statuses = [...new Set(all.flatMap((row) => Object.keys(row.statuses)))].sort();
    return { total: found.length, lines: all.length, statuses, indexed: 1, start, rows: found.slice(start, start + count) };
  },
  episode: ({ run, step, line }) => kept(stepOf(run, step).trees[line], `task ${line} of step ${step}`),
  tokens: ({ run, step, line, leaf, context, start, count }) => {
    const walk = kept(stepOf(run, step).walks[`${line}:${leaf}:${context}`], `attempt ${leaf} of this task`);
    const end = Math.min(start + count, walk.total);
    const columns = Object.entries(walk).map(([name, values]) => [name, Array.isArray(values) && name !== "spans" ? values.slice(start, end) : values]);
    return { ...Object.fromEntries(columns), start, end };
  },
  text: ({ run, step, line, span, start = 0 }) => {
    const text = kept(stepOf(run, step).texts[`${line}:${span}`], "this text");
    return { text: text.slice(start), start, total: text.length };
  },
  occurrences: ({ task }) => {
    const found = Object.entries(saved.steps).flatMap(([run, steps]) => Object.entries(steps).flatMap(([step, { rows }]) =>
      rows.filter((row) => row.task === task).map((row) => ({ run: Number(run), step, line: row.line, reward: row.reward }))));
    return { found, is_complete: true };
  },
};

export function answer(what, query) {
  return kept(ANSWERS[what], `the answer to "${what}"`)(query);
}

function stepOf(run, step) {
  return kept(saved.steps[run]?.[step], `step ${step}`);
}

function only(values, metrics) {
  return Object.fromEntries(metrics.split(",").filter((name) => name in values).map((name) => [name, values[name]]));
}

function kept(found, what) {
  if (found === undefined) throw new Error(`${what} is not in this saved page; "graft view RUN" shows everything`);
  return found;
}
