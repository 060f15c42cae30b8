const WIDE_CELL = 36, NARROW_CELL = 30, LETTER = 7.3, NARROW = 600, ROW_HEIGHT = 20, MOST_WITH_VALUES = 16, MOST_LIT = 200;

/** The ranks around a table, what each holds, and the messages that are under way between them. */
class Stage {
  constructor(run) {
    this.run = run;
    this.head = `head-${Stage.count = (Stage.count ?? 0) + 1}`;
    this.links = element("g");
    this.waits = element("g");
    this.boxes = element("g");
    this.caption = element("figcaption");
    const marker = element("marker", {id: this.head, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 6, markerHeight: 6, orient: "auto"},
      element("path", {class: "head", d: "M0 0L8 4L0 8z"}));
    this.svg = element("svg", {role: "img", "aria-label": "Ranks, what they hold, and the messages between them"},
      element("defs", {}, marker), this.boxes, this.waits, this.links);
    this.lit = new Map();
    this.longest = Math.max(1, ...run.vectors.map((vector) => vector.length));
    this.letters = Math.max(1, ...run.vectors.flat().map((number) => formatNumber(number).length));
  }

  /** Lay everything out in the width that there is. */
  layOut(width) {
    const count = this.run.ranks.length;
    const isCrowded = count > MOST_WITH_VALUES;
    this.cell = Math.max(width < NARROW ? NARROW_CELL : WIDE_CELL, LETTER * this.letters + 4);
    const room = width / (count > 4 ? 3.2 : 2.7) / this.cell;
    this.cells = isCrowded ? 0 : Math.max(1, Math.min(this.longest, Math.floor(room)));
    this.box = {w: Math.max(60, this.cells * this.cell + 8), h: isCrowded ? ROW_HEIGHT : 2 * ROW_HEIGHT + 6};
    const height = Math.max(count > 2 ? 240 : 110, Math.min(420, count > 2 ? width * 0.55 : 110));
    const across = Math.max(0, (width - this.box.w) / 2 - 4), down = count > 2 ? (height - this.box.h) / 2 - 4 : 0;
    const turn = count > 2 ? -Math.PI / 2 : Math.PI;
    this.places = this.run.ranks.map((_, rank) => {
      const angle = turn + (2 * Math.PI * rank) / count, reach = count > 1 ? across : 0;
      return {x: width / 2 + reach * Math.cos(angle), y: height / 2 + down * Math.sin(angle)};
    });
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    this.links.replaceChildren();
    this.lit.clear();
    this.boxes.replaceChildren(...this.run.ranks.map((rank, index) => this.makeBox(rank, index)));
  }

  makeBox(rank, index) {
    const {w, h} = this.box, {x, y} = this.places[index];
    const cells = Array.from({length: this.cells}, (_, i) => element("g", {},
      element("rect", {class: "cell", x: (i - this.cells / 2) * this.cell, y: 1, width: this.cell, height: ROW_HEIGHT}),
      element("text", {x: (i + 0.5 - this.cells / 2) * this.cell, y: 1 + ROW_HEIGHT / 2})));
    return element("g", {transform: `translate(${x} ${y})`},
      element("rect", {class: "box", x: -w / 2, y: -h / 2, width: w, height: h}),
      element("text", {y: this.cells ? -ROW_HEIGHT / 2 : 0}, `rank ${rank.rank}`), ...cells);
  }

  /** Show a moment. `isMoving`: messages are drawn where they are on their way, and not in the middle of it. */
  show(clock, time, isMoving) {
    this.run.ranks.forEach((_, rank) => this.showRank(clock, rank, time));
    const arrows = this.run.arrowsBetween(clock, time, time).slice(0, MOST_LIT);
    for (const [arrow, link] of this.lit) {
      if (!arrows.includes(arrow)) { link.remove(); this.lit.delete(arrow); }
    }
    for (const arrow of arrows) {
      if (!this.lit.has(arrow)) this.light(arrow);
      this.move(clock, arrow, time, isMoving);
    }
    this.showStandstill(clock, time);
    write(this.caption, this.run.collectives(clock, time).map((each) => this.describe(each)).join("; ") || "\u00a0");
  }

  /** Who waits for whom, once all of them are in calls that never end. */
  showStandstill(clock, time) {
    const waits = this.run.standstill?.waits ?? [];
    const isStill = ([rank]) => this.run.stack(clock, rank, time).some((place) => this.run.finish[clock][place] === Infinity);
    const arrows = waits.every(isStill) ? waits.flatMap(([rank, others]) => others.map((other) => this.connect(rank, other))) : [];
    this.waits.replaceChildren(...arrows);
  }

  /** A curve from one rank's box to another's, as an SVG path, and its three points. */
  curve(one, other) {
    const from = this.places[one], to = this.places[other], a = this.edge(from, to), b = this.edge(to, from);
    const bend = 0.12, c = {x: (a.x + b.x) / 2 - (b.y - a.y) * bend, y: (a.y + b.y) / 2 + (b.x - a.x) * bend};
    return {points: [a, c, b], d: `M${a.x} ${a.y}Q${c.x} ${c.y} ${b.x} ${b.y}`};
  }

  connect(rank, other) {
    return element("path", {class: "awaits", d: this.curve(rank, other).d, "marker-end": `url(#${this.head})`, "data-awaits": `${rank} ${other}`},
      element("title", {}, `rank ${rank} waits for rank ${other}`));
  }

  /** A collective, and who has come to it. */
  describe({name, bytes, ranks}) {
    const all = this.run.ranks.length, who = ranks.length === all ? `all ${all} ranks` : `rank ${ranks.join(", ")}`;
    return `In ${name} (${formatBytes(bytes)}): ${who}`;
  }

  showRank(clock, rank, time) {
    const box = this.boxes.children[rank], [place] = this.run.stack(clock, rank, time);
    const style = place === undefined ? "" : this.run.what(place)[STYLE];
    box.firstChild.style.fill = style ? `var(--${style.replaceAll(" ", "-")})` : "";
    const values = this.run.held(clock, rank, time) ?? [];
    for (let i = 0; i < this.cells; i++) {
      const cell = box.children[2 + i];
      const isMore = i === this.cells - 1 && values.length > this.cells;
      cell.style.display = i < values.length ? "" : "none";
      write(cell.lastChild, isMore ? "…" : i < values.length ? formatNumber(values[i]) : "");
    }
  }

  light(arrow) {
    const {points, d} = this.curve(this.run.rankOf[this.run.sent[arrow]], this.run.rankOf[this.run.received[arrow]]);
    const link = element("g", {"data-arrow": arrow},
      element("path", {class: "link", d, "marker-end": `url(#${this.head})`}),
      element("circle", {class: "packet", r: 5}),
      element("text", {class: "label"}, formatCargo(this.run, this.run.sent[arrow])));
    link.curve = points;
    this.links.append(link);
    this.lit.set(arrow, link);
  }

  /** Where the line from the middle of one box to that of another leaves the first. */
  edge(from, to) {
    const x = to.x - from.x, y = to.y - from.y;
    const part = Math.min(1, (this.box.w / 2 + 4) / Math.abs(x || 1e-9), (this.box.h / 2 + 4) / Math.abs(y || 1e-9));
    return {x: from.x + x * part, y: from.y + y * part};
  }

  move(clock, arrow, time, isMoving) {
    const link = this.lit.get(arrow), [a, c, b] = link.curve;
    const begin = this.run.begin[clock][this.run.sent[arrow]], end = Math.min(this.run.arrived(clock, arrow), this.run.length[clock]);
    const t = isMoving && end > begin ? (time - begin) / (end - begin) : 0.5;
    const at = (name) => (1 - t) ** 2 * a[name] + 2 * t * (1 - t) * c[name] + t ** 2 * b[name];
    const [, dot, label] = link.children;
    dot.setAttribute("cx", at("x"));
    dot.setAttribute("cy", at("y"));
    label.setAttribute("x", at("x"));
    label.setAttribute("y", at("y") - 12);
  }
}
