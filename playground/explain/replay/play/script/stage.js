/** The ranks around a table, what each holds, and the messages that are under way between them. */
class Stage {
  constructor(run) {
    this.run = run;
    this.head = `head-${Stage.count = (Stage.count ?? 0) + 1}`;
    this.links = element("g");
    this.waits = element("g");
    this.boxes = element("g");
    this.caption = element("figcaption");
    const look = {viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 6, markerHeight: 6, orient: "auto"};
    const marker = element("marker", {id: this.head, ...look},
      element("path", {class: "head", d: "M0 0L8 4L0 8z"}));
    this.svg = element("svg", {role: "img", "aria-label": "Ranks, what they hold, and the messages between them"},
      element("defs", {}, marker), this.boxes, this.waits, this.links);
    this.lit = new Map();
    this.longest = Math.max(0, ...run.vectors.map((vector) => vector.length));
    this.letters = Math.max(1, ...run.vectors.flat().map((number) => formatNumber(number).length));
  }

  /** Lay everything out in the width that there is. */
  layOut(width) {
    const count = this.run.ranks.length;
    const isCrowded = count > MOST_WITH_VALUES;
    this.cell = Math.max(width < NARROW ? NARROW_CELL : WIDE_CELL, LETTER * this.letters + 4);
    const room = width / (count > 4 ? 3.2 : 2.7) / this.cell;
    this.cells = isCrowded ? 0 : Math.min(this.longest, Math.max(1, Math.floor(room)));
    const least = width < NARROW ? HIGH_NARROW : HIGH;
    const height = count > 2 ? Math.max(least, Math.min(HIGHEST, width * 0.55)) : LOW;
    this.size = [width, height];
    this.place();
    while (this.cells > 0 && this.doBoxesMeet()) {
      this.cells--;
      this.place();
    }
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    this.links.replaceChildren();
    this.lit.clear();
    this.labelled = "";
    this.boxes.replaceChildren(...this.run.ranks.map((rank, index) => this.makeBox(rank, index)));
  }

  /** Give the ranks' boxes, with as many cells as we say, their places. */
  place() {
    const count = this.run.ranks.length, [width, height] = this.size;
    this.box = {w: Math.max(60, this.cells * this.cell + 8), h: this.cells ? 2 * ROW_HEIGHT + 6 : ROW_HEIGHT};
    const across = count > 1 ? Math.max(0, (width - this.box.w) / 2 - 4) : 0;
    const down = count > 2 ? (height - this.box.h) / 2 - 4 : 0;
    const turn = count > 2 ? -Math.PI / 2 : Math.PI;
    this.places = this.run.ranks.map((_, rank) => {
      const angle = turn + (2 * Math.PI * rank) / count;
      return {x: width / 2 + across * Math.cos(angle), y: height / 2 + down * Math.sin(angle)};
    });
  }

  /** Whether the boxes of two neighbours overlap. */
  doBoxesMeet() {
    const boxes = this.places.map((each) => ({...each, ...this.box}));
    return boxes.length > 1 && boxes.some((box, index) => overlap(box, boxes[(index + 1) % boxes.length]));
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
    this.placeLabels(arrows);
    this.showStandstill(clock, time);
    write(this.caption, this.tell(clock, time));
  }

  /** The collectives that ranks are in, in words. */
  tell(clock, time) {
    return this.run.collectives(clock, time).map((each) => this.describe(each)).join("; ") || "\u00a0";
  }

  /** Who waits for whom, once all of them are in calls that never end. */
  showStandstill(clock, time) {
    const waits = this.run.standstill?.waits ?? [];
    const finish = this.run.finish[clock];
    const isStill = ([rank]) => this.run.stack(clock, rank, time).some((place) => finish[place] === Infinity);
    const connect = ([rank, others]) => others.map((other) => this.connect(rank, other));
    this.waits.replaceChildren(...(waits.every(isStill) ? waits.flatMap(connect) : []));
  }

  /** A curve from one rank's box to another's, as an SVG path, and its three points. */
  curve(one, other) {
    const from = this.places[one], to = this.places[other], a = this.edge(from, to), b = this.edge(to, from);
    const bend = 0.12, c = {x: (a.x + b.x) / 2 - (b.y - a.y) * bend, y: (a.y + b.y) / 2 + (b.x - a.x) * bend};
    return {points: [a, c, b], d: `M${a.x} ${a.y}Q${c.x} ${c.y} ${b.x} ${b.y}`};
  }

  connect(rank, other) {
    const look = {class: "awaits", d: this.curve(rank, other).d, "marker-end": `url(#${this.head})`};
    return element("path", {...look, "data-awaits": `${rank} ${other}`},
      element("title", {}, `rank ${rank} waits for rank ${other}`));
  }

  /** A collective, and who has come to it. */
  describe({name, bytes, group, ranks}) {
    const all = this.run.ranks.length, who = ranks.length === all ? `all ${all} ranks` : `rank ${ranks.join(", ")}`;
    const among = group.length && group.length < all ? ` among ranks ${group.join(", ")}` : "";
    return `In ${name} (${formatBytes(bytes)})${among}: ${who}`;
  }

  showRank(clock, rank, time) {
    const box = this.boxes.children[rank], [place] = this.run.stack(clock, rank, time);
    const style = place === undefined ? "" : this.run.what(place).style;
    box.firstChild.style.fill = style ? `var(--${style.replaceAll(" ", "-")})` : "";
    const values = this.run.held(clock, rank, time) ?? [];
    for (let i = 0; i < this.cells; i++) {
      const cell = box.children[2 + i];
      const isMore = i > 0 && i === this.cells - 1 && values.length > this.cells;
      cell.style.display = i < values.length ? "" : "none";
      write(cell.lastChild, isMore ? "…" : i < values.length ? formatNumber(values[i]) : "");
    }
  }

  light(arrow) {
    const {points, d} = this.curve(this.run.rankOf[this.run.sent[arrow]], this.run.rankOf[this.run.received[arrow]]);
    const link = element("g", {"data-arrow": arrow},
      element("path", {class: "link", d, "marker-end": `url(#${this.head})`}),
      element("circle", {class: "packet", r: 5}),
      element("text", {class: "label"}));
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
    const link = this.lit.get(arrow);
    const begin = this.run.begin[clock][this.run.sent[arrow]];
    const end = Math.min(this.run.arrived(clock, arrow), this.run.length[clock]);
    const t = isMoving && end > begin ? (time - begin) / (end - begin) : 0.5;
    const dot = link.children[1], {x, y} = pointOf(link.curve, t);
    dot.setAttribute("cx", x);
    dot.setAttribute("cy", y);
  }

  /** Put a label beside each line, where it covers no rank, no other label and no other line. Where there is no room
   * for the values it has the bytes alone, or else is left out: the moment in words has all of it. */
  placeLabels(arrows) {
    if (this.labelled === arrows.join(" ")) return;
    this.labelled = arrows.join(" ");
    const taken = this.places.map(({x, y}) => ({x, y, w: this.box.w, h: this.box.h}));
    const lines = arrows.map((arrow) => ALONG.map((t) => ({...pointOf(this.lit.get(arrow).curve, t), w: 6, h: 6})));
    arrows.forEach((arrow, index) => {
      const label = this.lit.get(arrow).children[2], sent = this.run.sent[arrow];
      const others = [...taken, ...lines.filter((_, each) => each !== index).flat()];
      const texts = [formatCargo(this.run, sent), formatBytes(this.run.what(sent).bytes)];
      const places = texts.flatMap((text) => this.placesFor(text, this.lit.get(arrow).curve));
      const found = places.find((place) => !others.some((other) => overlap(place, other)));
      write(label, found?.text ?? "");
      if (!found) return;
      label.setAttribute("x", found.x);
      label.setAttribute("y", found.y);
      taken.push(found);
    });
  }

  /** The places beside a curve, within the picture, at which there could be a label. */
  placesFor(text, curve) {
    const w = text.length * LETTER + 6, h = LABEL_HEIGHT, [width, height] = this.size, [from, , to] = curve;
    const long = Math.hypot(to.x - from.x, to.y - from.y) || 1;
    const across = {x: (from.y - to.y) / long, y: (to.x - from.x) / long};
    const away = (Math.abs(across.x) * w + Math.abs(across.y) * h) / 2 + 8;
    return ALONG.flatMap((t) => [-away, away].map((by) => {
      const {x, y} = pointOf(curve, t);
      return {text, x: x + by * across.x, y: y + by * across.y, w, h};
    })).filter(({x, y}) => x >= w / 2 && x <= width - w / 2 && y >= h / 2 && y <= height - h / 2);
  }
}

/** A point of a curve with these three points, a part of the way along it. */
function pointOf([a, c, b], t) {
  const at = (name) => (1 - t) ** 2 * a[name] + 2 * t * (1 - t) * c[name] + t ** 2 * b[name];
  return {x: at("x"), y: at("y")};
}

/** Whether two rectangles, given by their middles, overlap. */
function overlap(one, other) {
  return Math.abs(one.x - other.x) < (one.w + other.w) / 2 && Math.abs(one.y - other.y) < (one.h + other.h) / 2;
}
