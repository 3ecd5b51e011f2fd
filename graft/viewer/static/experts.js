// The load of every expert as a picture: a row for each layer, a column for each expert.

import { two } from "./colours.js";
import { make, number } from "./dom.js";

const FULL = 2; // doublings to either side of the even share that have the full colour
const CELL = 6; // pixels of a row

export function loadPicture({ steps, layers, loads }) {
  const [rows, columns] = [loads.length, loads[0].length];
  const canvas = make("canvas", { class: "loads", width: columns, height: rows, role: "img", "aria-label": `Loads of ${columns} experts in ${rows} layers` });
  canvas.style.height = `${Math.max(rows * CELL, 24)}px`;
  const context = canvas.getContext("2d");
  for (const [y, row] of loads.entries()) {
    for (const [x, load] of row.entries()) {
      context.fillStyle = two(load ? Math.log2(load) / FULL : -1);
      context.fillRect(x, y, 1, 1);
    }
  }
  const under = make("p", { class: "note" }, `${steps}: a row for each layer, a column for each expert. Blue: more than its even share of tokens (full at 4 times), red: less (full at a quarter, or none).`);
  canvas.addEventListener("mousemove", (event) => {
    const box = canvas.getBoundingClientRect();
    const cell = (at, size, count) => Math.min(Math.max(Math.floor((at / size) * count), 0), count - 1);
    const [x, y] = [cell(event.clientX - box.left, box.width, columns), cell(event.clientY - box.top, box.height, rows)];
    canvas.title = `layer ${layers[y]}, expert ${x}: ${number(loads[y][x], 3)} times its even share`;
  });
  return [make("h2", {}, "Load of experts"), canvas, under];
}
