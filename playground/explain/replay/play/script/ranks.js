/** A table: what each rank does, what it holds, and the line at which it is. */
class Ranks {
  /** `select(rank)` is called to look at a rank's line, `explain(wait)` to see what caused one of its waits. */
  constructor(run, select, explain) {
    this.run = run;
    this.explain = explain;
    const rows = run.ranks.map((rank, index) => this.makeRow(rank, () => select(index)));
    this.body = element("tbody", {}, ...rows);
    const head = ["Rank", "Does", "Holds", "Line"].map((name) => element("th", {scope: "col"}, name));
    this.root = element("table", {}, element("caption", {class: "muted"}, "Where every rank is"),
      element("thead", {}, element("tr", {}, ...head)), this.body);
    this.shown = run.ranks.map(() => ({}));
  }

  makeRow(rank, select) {
    const button = element("button", {click: select, title: `Show the line of rank ${rank.rank}`}, `${rank.rank}`);
    button.setAttribute("aria-label", `Rank ${rank.rank} on ${rank.device}: show its line`);
    return element("tr", {}, element("th", {scope: "row"}, button), element("td", {class: "does"}),
      element("td", {class: "values"}), element("td", {class: "line"}, element("code", {}, element("a"))));
  }

  show(clock, time, selected) {
    this.run.ranks.forEach((_, rank) => {
      const row = this.body.rows[rank], shown = this.shown[rank];
      if (rank === selected) row.setAttribute("aria-current", "true"); else row.removeAttribute("aria-current");
      this.showDoing(row.cells[1], clock, rank, time);
      const held = this.run.held(clock, rank, time);
      if (shown.held !== held || !("held" in shown)) row.cells[2].replaceChildren(...this.formatHeld(held));
      shown.held = held;
      this.showLine(row.cells[3].querySelector("a"), this.run.sourceAt(clock, rank, time));
    });
  }

  /** Give each row the height of the tallest that it is at these moments. */
  reserve(clock, moments) {
    const {run} = this, held = (rank) => (time) => (run.held(clock, rank, time) ?? []).map(formatNumber).join(" ");
    const tries = run.ranks.map((_, rank) => [(time) => formatDoing(run, clock, rank, time), held(rank), (time) => this.tellLine(run.sourceAt(clock, rank, time))]
      .map((text) => longest(moments, text)));
    reserve([...this.body.rows].flatMap((row) => [...row.cells].slice(1)), TRIED, (i) => tries.forEach(([doing, holding, line], rank) => {
      const {cells} = this.body.rows[rank], at = (times) => times[Math.min(i, times.length - 1)];
      this.showDoing(cells[1], clock, rank, at(doing));
      cells[2].replaceChildren(...this.formatHeld(run.held(clock, rank, at(holding))));
      this.showLine(cells[3].querySelector("a"), run.sourceAt(clock, rank, at(line)));
      this.shown[rank] = {};
    }));
  }

  tellLine(source) { return source === null ? "" : `${formatSource(this.run, source)}  ${lineOf(this.run, source)}`; }

  /** The line leads to the page of its code, if there is one. */
  showLine(link, source) {
    write(link, this.tellLine(source));
    const address = source !== null && addressOf(this.run, source);
    if (address) link.href = address; else link.removeAttribute("href");
  }

  /** A wait is a button that leads to what caused it. */
  showDoing(cell, clock, rank, time) {
    const text = formatDoing(this.run, clock, rank, time);
    if (cell.textContent === text) return;
    const wait = this.run.waitOf.get(this.run.stack(clock, rank, time)[0]);
    cell.replaceChildren(wait === undefined ? text : element("button", {click: () => this.explain(wait)}, text));
  }

  formatHeld(held) {
    if (held === undefined) return [];
    if (held === null) return ["too many numbers to show"];
    return held.map((value) => element("span", {"data-value": value, title: value}, formatNumber(value)));
  }
}
