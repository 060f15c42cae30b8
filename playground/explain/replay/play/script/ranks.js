/** A table: what each rank does, what it holds, and the line at which it is. */
class Ranks {
  /** `select(rank)` is called to look at a rank's line, `explain(wait)` to see what caused one of its waits. */
  constructor(run, select, explain) {
    this.run = run;
    this.explain = explain;
    const rows = run.ranks.map((rank, index) => this.makeRow(rank, () => select(index)));
    this.body = element("tbody", {}, ...rows);
    const head = ["Rank", "Does", "Holds", "Line"].map((name) => element("th", {scope: "col"}, name));
    this.isLow = rows.length > MOST_TALL;
    const kinds = [run.holdings.every((changes) => !changes.length) && "bare", this.isLow && "many"];
    this.root = element("table", {class: kinds.filter(Boolean).join(" ")},
      element("caption", {class: "muted"}, "Where every rank is"),
      element("thead", {}, element("tr", {}, ...head)), this.body);
    this.shown = run.ranks.map(() => ({}));
  }

  makeRow(rank, select) {
    const button = element("button", {click: select, title: `Show the line of rank ${rank.rank}`}, `${rank.rank}`);
    button.setAttribute("aria-label", `Rank ${rank.rank} on ${rank.device}: show its line`);
    return element("tr", {}, element("th", {scope: "row"}, button), element("td", {class: "does"}),
      element("td", {class: "values"}), element("td", {class: "line"}, element("code", {}, element("a"))));
  }

  /** Take the width that numbers have: in low rows the button that opens the others is in the same line. */
  layOut() {
    this.room = this.body.rows[0].cells[2].clientWidth - CELL_PADDING - (this.isLow ? OPENER : 0);
    for (const shown of this.shown) shown.text = undefined;
  }

  show(clock, time, selected) {
    this.run.ranks.forEach((_, rank) => {
      const row = this.body.rows[rank];
      if (rank === selected) row.setAttribute("aria-current", "true"); else row.removeAttribute("aria-current");
      this.showRow(clock, rank, time, time, time);
    });
  }

  /** What a rank does, what it holds, and its line, each at a moment. */
  showRow(clock, rank, doing, holding, line) {
    const {run} = this, {cells} = this.body.rows[rank];
    this.showDoing(cells[1], clock, rank, doing);
    this.showHeld(cells[2], rank, run.held(clock, rank, holding), run.resultOf(clock, rank, holding));
    this.showLine(cells[3].querySelector("a"), run.sourceAt(clock, rank, line));
  }

  /** Give each row the height of the tallest that it is at these moments, with its numbers in one line. */
  reserve(clock, moments) {
    const {run} = this, tries = run.ranks.map((_, rank) => [
      (time) => formatDoing(run, clock, rank, time),
      (time) => `${run.resultOf(clock, rank, time)} ${(run.held(clock, rank, time) ?? []).map(formatNumber).join(" ")}`,
      (time) => this.tellLine(run.sourceAt(clock, rank, time)),
    ].map((text) => longest(moments, text)));
    const open = this.shown.map((shown) => shown.isOpen);
    for (const shown of this.shown) shown.isOpen = false;
    const cells = [...this.body.rows].flatMap((row) => [...row.cells].slice(1));
    reserve(cells, TRIED, (i) => tries.forEach((times, rank) => {
      this.showRow(clock, rank, ...times.map((each) => each[Math.min(i, each.length - 1)]));
    }));
    this.shown.forEach((shown, rank) => { Object.assign(shown, {isOpen: open[rank], text: undefined}); });
  }

  tellLine(source) {
    if (source === null) return "";
    return `${formatSource(this.run, source).split("/").at(-1)}  ${lineOf(this.run, source)}`;
  }

  /** The line leads to the page of its code, if there is one. */
  showLine(link, source) {
    write(link, this.tellLine(source));
    link.title = source === null ? "" : formatSource(this.run, source);
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

  /** Numbers, and the collective whose result they are: one line of them, and a button that opens the others. */
  showHeld(cell, rank, held, result) {
    const shown = this.shown[rank], text = held === undefined ? "" : `${result} ${held}`;
    if (shown.text === text) return;
    shown.text = text;
    if (!held) return void cell.replaceChildren(held === null ? "too many numbers to show" : "");
    const numbers = held.map((value) => element("span", {"data-value": value, title: value}, formatNumber(value)));
    const count = this.countInLine(numbers), box = element("div", {class: shown.isOpen ? "open" : ""}, ...numbers);
    if (result) box.prepend(element("i", {title: `the result of ${result}`}, `after ${result}`));
    if (count < numbers.length) box.append(this.makeOpener(cell, rank, held, result, numbers.length - count));
    if (!shown.isOpen) for (const each of numbers.slice(count)) each.hidden = true;
    cell.replaceChildren(box);
  }

  /** How many of these numbers have room in one line: at least one. */
  countInLine(numbers) {
    let width = 0;
    const count = numbers.findIndex((each) => (width += each.textContent.length * DIGIT + AROUND_NUMBER) > this.room);
    return count < 0 ? numbers.length : Math.max(1, count);
  }

  makeOpener(cell, rank, held, result, more) {
    const shown = this.shown[rank], open = () => {
      shown.isOpen = !shown.isOpen;
      shown.text = undefined;
      this.showHeld(cell, rank, held, result);
      cell.querySelector("button").focus({preventScroll: true});
    };
    const text = shown.isOpen ? "one line" : `… ${more} more`;
    return element("button", {click: open, "aria-expanded": `${shown.isOpen ?? false}`}, text);
  }
}
