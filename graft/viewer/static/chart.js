// One metric of several runs on a canvas: raw values faint, smoothed ones strong, alarms as marks. Runs that differ in
// the seed alone may be one curve, their mean, with a band around it.

import { download, hideTip, make, number, showTip } from "./dom.js";

const EDGE = { left: 54, right: 14, top: 12, bottom: 24 };

export class Chart {
  /** `open(run, step)` is called when a point is clicked. */
  constructor(metric, about, open) {
    Object.assign(this, { metric, open });
    this.series = [];
    this.how = { smoothing: 0, isLog: false, axis: "step" };
    this.canvas = make("canvas", { tabindex: 0, role: "img" });
    this.note = make("p", { class: "note" });
    const words = Object.entries(about ?? {}).filter(([, text]) => text).map(([name, text]) => `${name}: ${text}`);
    const help = words.length
      ? make("button", { type: "button", class: "help", title: words.join("\n"), "aria-label": `what ${metric} means` }, "?")
      : null;
    const explained = make("div", { class: "explained", hidden: true }, ...words.map((line) => make("p", {}, line)));
    help?.addEventListener("click", () => (explained.hidden = !explained.hidden));
    this.csv = make("a", { class: "button", download: "curves.csv" }, "CSV");
    const png = make("button", { type: "button", on: { click: () => this.save() } }, "PNG");
    this.element = make(
      "figure",
      { class: "chart", "data-metric": metric },
      make("figcaption", {}, make("span", { class: "name", title: words.join("\n") || metric }, metric), help, make("span", { class: "gap" }), png, this.csv),
      explained,
      this.canvas,
      this.note,
    );
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX, event.clientX, event.clientY));
    this.canvas.addEventListener("click", (event) => this.choose(event.offsetX, event.offsetY));
    this.canvas.addEventListener("pointerleave", () => this.leave());
    this.canvas.addEventListener("blur", () => this.leave());
    this.canvas.addEventListener("keydown", (event) => this.press(event));
    this.watch = new ResizeObserver(() => this.draw());
    this.watch.observe(this.canvas);
  }

  /** series: [{run, name, colour, x, y, steps, alarms: [{step, level, text, x}], band: {low, high, count, of},
   *  marks: [{x, y, error, words}], ink}]; most have neither band nor marks */
  show(series, how) {
    this.how = how;
    this.series = series.map((one) => ({ marks: [], ...one, smooth: smoothed(one.y, how.smoothing), edges: edges(one.band, how.smoothing) }));
    this.draw();
  }

  save() {
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    const sheet = document.createElement("canvas");
    const room = 26 + 16 * this.series.length;
    [sheet.width, sheet.height] = [2 * width, 2 * (height + room)];
    const pen = sheet.getContext("2d");
    pen.scale(2, 2);
    const style = getComputedStyle(document.documentElement);
    pen.fillStyle = style.getPropertyValue("--page");
    pen.fillRect(0, 0, width, height + room);
    pen.fillStyle = style.getPropertyValue("--ink");
    pen.font = "600 13px system-ui, sans-serif";
    pen.fillText(this.metric, 10, 17);
    pen.save();
    pen.translate(0, 22);
    this.paint(pen, width, height);
    pen.restore();
    pen.font = "12px system-ui, sans-serif";
    this.series.forEach((one, i) => {
      const y = height + 36 + 16 * i;
      pen.fillStyle = one.colour;
      pen.fillRect(10, y - 8, 14, 4);
      pen.fillStyle = style.getPropertyValue("--ink");
      pen.fillText(one.name, 30, y);
    });
    sheet.toBlob((blob) => download(`${this.metric.replaceAll("/", "_")}.png`, blob));
  }

  draw() {
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    if (!width || !height) return;
    const scale = devicePixelRatio || 1;
    [this.canvas.width, this.canvas.height] = [Math.round(width * scale), Math.round(height * scale)];
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    this.paint(pen, width, height);
    const last = this.series.map((one) => {
      const known = one.y.filter((value) => value !== null);
      const marks = one.marks.filter((mark) => mark.words).map((mark) => `, ${mark.words}`);
      return `${one.name} ${known.length ? number(known.at(-1)) : "no value"}${marks.join("")}`;
    });
    this.canvas.setAttribute("aria-label", `${this.metric}, latest: ${last.join(", ")}`);
    this.canvas.dataset.points = this.series.reduce((sum, one) => sum + one.y.filter((v) => v !== null).length, 0);
  }

  paint(pen, width, height) {
    const style = getComputedStyle(document.documentElement);
    const [ink, line] = ["--faint", "--line"].map((name) => style.getPropertyValue(name));
    const { isLog, axis } = this.how;
    const drawn = (value) => value !== null && (!isLog || value > 0);
    const xs = this.series.flatMap((one) => [...one.x.filter((x, i) => x !== null && drawn(one.y[i])), ...one.marks.map((mark) => mark.x)]);
    const ys = this.series.flatMap((one) => [one.y, ...one.edges, ...one.marks.map(({ y, error }) => [y - error, y + error])].flatMap((values) => values.filter(drawn)));
    this.note.textContent = ys.length ? "" : isLog && this.series.some((one) => one.y.some((v) => v !== null)) ? "nothing above 0 to show on a log scale" : "no values yet";
    this.view = null;
    if (!ys.length || !xs.length) return;
    const scaled = (value) => (isLog ? Math.log10(value) : value);
    let [low, high] = [least(ys.map(scaled)), most(ys.map(scaled))];
    if (low === high) [low, high] = [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
    const spare = (high - low) * 0.05;
    [low, high] = [low - spare, high + spare];
    let [from, to] = [least(xs), most(xs)];
    if (from === to) [from, to] = [from - 0.5, to + 0.5];
    const across = width - EDGE.left - EDGE.right;
    const down = height - EDGE.top - EDGE.bottom;
    const atX = (x) => EDGE.left + ((x - from) / (to - from)) * across;
    const atY = (y) => EDGE.top + (1 - (scaled(y) - low) / (high - low)) * down;
    this.view = { from, to, atX, atY, across, width, height };

    pen.font = "11px system-ui, sans-serif";
    pen.lineWidth = 1;
    pen.fillStyle = ink;
    pen.strokeStyle = line;
    pen.textAlign = "right";
    for (const tick of ticks(low, high, Math.max(Math.floor(down / 45), 4))) {
      const y = EDGE.top + (1 - (tick - low) / (high - low)) * down;
      segment(pen, EDGE.left, y, width - EDGE.right, y);
      pen.fillText(short(isLog ? 10 ** tick : tick), EDGE.left - 6, y + 4);
    }
    pen.textAlign = "center";
    for (const tick of ticks(from, to, Math.max(Math.floor(across / (axis === "wall" ? 130 : 60)), 2))) {
      if (axis === "step" && !Number.isInteger(tick)) continue;
      segment(pen, atX(tick), height - EDGE.bottom, atX(tick), height - EDGE.bottom + 4);
      const half = pen.measureText(place(tick, axis)).width / 2;
      pen.fillText(place(tick, axis), Math.min(Math.max(atX(tick), half), width - half), height - 6);
    }
    for (const one of this.series) {
      if (one.band) area(pen, one.x, one.edges, atX, atY, drawn, one.colour);
      const isSmooth = this.how.smoothing > 0;
      curve(pen, one.x, one.y, atX, atY, drawn, one.colour, isSmooth ? 0.25 : 1);
      if (isSmooth) curve(pen, one.x, one.smooth, atX, atY, drawn, one.colour, 1);
      for (const alarm of one.alarms) {
        if (alarm.x === null || alarm.x === undefined) continue;
        pen.fillStyle = alarm.level === "alarm" ? "#d02b2b" : "#d99a00";
        pen.strokeStyle = pen.fillStyle;
        const x = atX(alarm.x);
        pen.globalAlpha = 0.35;
        segment(pen, x, EDGE.top, x, height - EDGE.bottom);
        pen.globalAlpha = 1;
        pen.beginPath();
        pen.moveTo(x - 5, EDGE.top - 9);
        pen.lineTo(x + 5, EDGE.top - 9);
        pen.lineTo(x, EDGE.top);
        pen.fill();
      }
    }
    for (const one of this.series) {
      for (const mark of one.marks) {
        pen.strokeStyle = pen.fillStyle = one.ink ?? one.colour;
        diamond(pen, mark, atX, atY);
        if (!mark.words) continue;
        const isLow = atY(mark.y) < height / 2; // words go where there is more room
        [pen.fillStyle, pen.strokeStyle] = ["--ink", "--page"].map((name) => style.getPropertyValue(name));
        label(pen, mark.words, atX(mark.x), atY(mark.y - (isLow ? 1 : -1) * mark.error) + (isLow ? 20 : -12), atX(mark.x) > width / 2);
      }
    }
  }

  /** Values at a place of the canvas. */
  point(at, clientX, clientY) {
    if (!this.view) return;
    const { from, to, across, atX, atY, height } = this.view;
    const wanted = from + ((at - EDGE.left) / across) * (to - from);
    this.draw();
    const pen = this.canvas.getContext("2d");
    const rows = [];
    let heading = "";
    for (const one of this.series) {
      const i = nearest(one.x, one.y, wanted);
      if (i < 0) continue;
      if (!heading) {
        heading = `${this.how.axis === "step" ? "step " : ""}${place(one.x[i], this.how.axis)}`;
        pen.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--faint");
        segment(pen, atX(one.x[i]), EDGE.top, atX(one.x[i]), height - EDGE.bottom);
        this.at = atX(one.x[i]);
      }
      const shown = this.how.smoothing > 0 ? ` (smoothed ${number(one.smooth[i])})` : "";
      rows.push([one.name, `${number(one.y[i], 6)}${shown}${one.band ? around(one.band, i) : ""}`]);
      pen.fillStyle = one.colour;
      pen.beginPath();
      pen.arc(atX(one.x[i]), atY(this.how.smoothing > 0 ? one.smooth[i] : one.y[i]), 3.5, 0, 7);
      pen.fill();
      for (const alarm of one.alarms) {
        if (alarm.x !== null && Math.abs(atX(alarm.x) - atX(one.x[i])) < 3) rows.push([alarm.level, alarm.text]);
      }
    }
    if (rows.length) showTip(clientX, clientY, rows, heading);
  }

  /** The run whose curve is nearest, and its step there. */
  choose(x, y) {
    if (!this.view) return;
    const { from, to, across, atY } = this.view;
    const wanted = from + ((x - EDGE.left) / across) * (to - from);
    const near = this.series
      .map((one) => ({ one, i: nearest(one.x, one.y, wanted) }))
      .filter(({ i }) => i >= 0)
      .map(({ one, i }) => ({ one, i, off: Math.abs(atY((this.how.smoothing > 0 ? one.smooth : one.y)[i]) - y) }))
      .reduce((a, b) => (a && a.off <= b.off ? a : b), null);
    if (near) this.open(near.one.run, near.one.steps[near.i]);
  }

  press(event) {
    if (event.key === "Enter" && this.at !== undefined) return this.choose(this.at, EDGE.top);
    if (!this.view || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    event.preventDefault();
    const xs = [...new Set(this.series.flatMap((one) => one.x.filter((x, i) => one.y[i] !== null)))].sort((a, b) => a - b);
    const now = this.at === undefined ? -1 : xs.findIndex((x) => this.view.atX(x) >= this.at - 0.01);
    const next = xs[Math.min(Math.max(now + (event.key === "ArrowRight" ? 1 : -1), 0), xs.length - 1)];
    const box = this.canvas.getBoundingClientRect();
    this.point(this.view.atX(next), box.left + this.view.atX(next), box.top + 20);
  }

  leave() {
    hideTip();
    this.draw();
  }

  close() {
    this.watch.disconnect();
  }
}

/** An exponential mean without the pull towards its start; gaps stay gaps. */
export function smoothed(values, weight) {
  let [sum, mass] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

/** Both ends of a band, as strongly smoothed as its curve; of a curve without one nothing. */
function edges(band, weight) {
  return band ? [smoothed(band.low, weight), smoothed(band.high, weight)] : [];
}

/** " [0.2, 0.4]", and how many seeds were there if not all. */
function around({ low, high, count, of }, i) {
  const those = count[i] < of ? `, ${count[i]} of ${of}` : "";
  return ` [${number(low[i])}, ${number(high[i])}]${those}`;
}

function area(pen, xs, [low, high], atX, atY, drawn, colour) {
  const there = xs.map((x, i) => i).filter((i) => xs[i] !== null && drawn(low[i]) && drawn(high[i]));
  pen.globalAlpha = 0.18;
  pen.fillStyle = colour;
  pen.beginPath();
  there.forEach((i, n) => (n ? pen.lineTo(atX(xs[i]), atY(high[i])) : pen.moveTo(atX(xs[i]), atY(high[i]))));
  there.reverse().forEach((i) => pen.lineTo(atX(xs[i]), atY(low[i])));
  pen.fill();
  pen.globalAlpha = 1;
}

function curve(pen, xs, ys, atX, atY, drawn, colour, alpha) {
  pen.globalAlpha = alpha;
  pen.strokeStyle = pen.fillStyle = colour;
  pen.lineWidth = 1.6;
  pen.lineJoin = "round";
  pen.beginPath();
  const known = xs.map((x, i) => [x, ys[i]]).filter(([x, y]) => x !== null && drawn(y));
  known.forEach(([x, y], i) => (i ? pen.lineTo(atX(x), atY(y)) : pen.moveTo(atX(x), atY(y))));
  pen.stroke();
  if (known.length <= 40) {
    for (const [x, y] of known) {
      pen.beginPath();
      pen.arc(atX(x), atY(y), 2.2, 0, 7);
      pen.fill();
    }
  }
  pen.globalAlpha = 1;
  pen.lineWidth = 1;
}

/** A value with its error to either side. */
function diamond(pen, { x, y, error }, atX, atY) {
  const [left, top] = [atX(x), atY(y)];
  pen.lineWidth = 2;
  if (error) segment(pen, left, atY(y - error), left, atY(y + error));
  pen.lineWidth = 1;
  pen.beginPath();
  for (const [dx, dy] of [[0, -6], [6, 0], [0, 6], [-6, 0]]) pen.lineTo(left + dx, top + dy);
  pen.fill();
}

/** Words that stay readable on a curve. */
function label(pen, words, x, y, isRight) {
  pen.font = "600 12px system-ui, sans-serif";
  pen.textAlign = isRight ? "right" : "left";
  pen.lineWidth = 4;
  pen.strokeText(words, x + (isRight ? 6 : -6), y);
  pen.fillText(words, x + (isRight ? 6 : -6), y);
  pen.lineWidth = 1;
  pen.font = "11px system-ui, sans-serif";
}

function segment(pen, x0, y0, x1, y1) {
  pen.beginPath();
  pen.moveTo(x0, y0);
  pen.lineTo(x1, y1);
  pen.stroke();
}

function ticks(low, high, many) {
  const rough = (high - low) / many;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-6; tick += step) {
    found.push(Math.abs(tick) < step * 1e-6 ? 0 : Number(tick.toPrecision(12)));
  }
  return found;
}

/** A tick in few letters: 1.00e-7 is 1e-7. */
function short(value) {
  return number(value, 3).replace(/\.?0+e/, "e");
}

function place(x, axis) {
  if (axis === "step") return number(x, 6);
  if (axis === "wall") {
    const when = new Date(x * 1000);
    return when.toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit" });
  }
  const whole = Math.round(x);
  const [hours, minutes, seconds] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (n) => String(n).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(seconds)}` : `${minutes}:${two(seconds)}`;
}

function nearest(xs, ys, wanted) {
  let best = -1;
  xs.forEach((x, i) => {
    if (x === null || ys[i] === null) return;
    if (best < 0 || Math.abs(x - wanted) < Math.abs(xs[best] - wanted)) best = i;
  });
  return best;
}

const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
