// A list of any length of which only the rows in view exist.
//
//   20,000 rows of 30 px: a spacer of 600,000 px, and some forty elements that move along

const PAGE = 100; // rows per question
const SPARE = 6; // rows drawn beyond each edge

export class VirtualList {
  /** `fetchPage(start, count)` promises {rows, total}; `fillRow(element, row, index)` writes one. */
  constructor(box, rowHeight, { fetchPage, makeRow, fillRow, open }) {
    Object.assign(this, { box, rowHeight, fetchPage, makeRow, fillRow, open });
    this.spacer = document.createElement("div");
    this.spacer.className = "spacer";
    this.pool = [];
    this.active = 0;
    this.isWaiting = false;
    box.tabIndex = 0;
    box.replaceChildren(this.spacer);
    box.addEventListener("scroll", () => this.later(), { passive: true });
    box.addEventListener("keydown", (event) => this.press(event));
    this.watch = new ResizeObserver(() => this.later());
    this.watch.observe(box);
    this.reset();
  }

  /** Forget all rows: another order, another file. */
  reset() {
    this.generation = (this.generation ?? 0) + 1;
    this.pages = new Map();
    this.asked = new Set();
    this.total = 0;
    this.active = 0;
    this.box.scrollTop = 0;
    this.ask(0);
  }

  /** The same rows, asked for again without moving. */
  refresh() {
    this.generation += 1;
    this.asked = new Set();
    const [first, last] = this.range();
    for (let page = Math.floor(first / PAGE); page <= Math.floor(last / PAGE); page++) this.ask(page, true);
  }

  later() {
    if (this.isWaiting) return;
    this.isWaiting = true;
    requestAnimationFrame(() => {
      this.isWaiting = false;
      this.draw();
    });
  }

  range() {
    const first = Math.max(Math.floor(this.box.scrollTop / this.rowHeight) - SPARE, 0);
    const many = Math.ceil(this.box.clientHeight / this.rowHeight) + 2 * SPARE;
    return [first, Math.min(first + many, this.total) - 1];
  }

  draw() {
    const height = `${this.total * this.rowHeight}px`;
    if (this.spacer.style.height !== height) this.spacer.style.height = height;
    const [first, last] = this.range();
    const many = Math.max(last - first + 1, 0);
    while (this.pool.length < many) {
      const element = this.makeRow();
      element.addEventListener("click", () => this.choose(Number(element.dataset.index)));
      this.spacer.append(element);
      this.pool.push(element);
    }
    this.pool.forEach((element, place) => {
      // row i always lives in element i modulo the pool: scrolling by one row rewrites one element
      const index = first + ((((place - first) % this.pool.length) + this.pool.length) % this.pool.length);
      element.hidden = index > last;
      if (element.hidden) return;
      const row = this.pages.get(Math.floor(index / PAGE))?.[index % PAGE];
      if (!row) this.ask(Math.floor(index / PAGE));
      if (element.shown !== row || Number(element.dataset.index) !== index) {
        element.shown = row;
        element.dataset.index = index;
        element.style.transform = `translateY(${index * this.rowHeight}px)`;
        element.setAttribute("aria-rowindex", index + 2);
        this.fillRow(element, row, index);
      }
      element.classList.toggle("active", index === this.active);
    });
  }

  async ask(page, again = false) {
    if (this.asked.has(page) && !again) return;
    this.asked.add(page);
    const generation = this.generation;
    try {
      const found = await this.fetchPage(page * PAGE, PAGE);
      if (generation !== this.generation) return;
      this.pages.set(page, found.rows);
      this.total = found.total;
    } catch (error) {
      this.asked.delete(page);
      this.failed?.(error);
      return;
    }
    this.later();
  }

  choose(index) {
    this.active = index;
    const row = this.pages.get(Math.floor(index / PAGE))?.[index % PAGE];
    this.later();
    if (row) this.open(row);
  }

  press(event) {
    const screen = Math.max(Math.floor(this.box.clientHeight / this.rowHeight) - 1, 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: screen, PageUp: -screen };
    let to = this.active + (moves[event.key] ?? 0);
    if (event.key === "Home") to = 0;
    else if (event.key === "End") to = this.total - 1;
    else if (event.key === "Enter") return this.choose(this.active);
    else if (!(event.key in moves)) return;
    event.preventDefault();
    this.active = Math.min(Math.max(to, 0), Math.max(this.total - 1, 0));
    const top = this.active * this.rowHeight;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    const bottom = top + this.rowHeight - this.box.clientHeight;
    if (bottom > this.box.scrollTop) this.box.scrollTop = bottom;
    this.later();
  }

  close() {
    this.watch.disconnect();
    this.generation += 1;
  }
}
