/** All ranks below each other, time to the right: bars, messages, and where we are. Only what is in sight is drawn. */
class Timeline {
  /** `goTo(time)` is called to go to a moment, `choose(place)` when an event is clicked. */
  constructor(run, goTo, choose) {
    Object.assign(this, {run, goTo, choose, chosen: -1});
    this.back = element("canvas", {"aria-hidden": "true"});
    this.front = element("canvas", {
      role: "img",
      "aria-label": "All ranks below each other, time to the right",
      pointerdown: (event) => this.press(event),
      pointermove: (event) => this.drag(event),
      pointerup: (event) => this.release(event),
    });
    this.root = element("div", {class: "timeline"}, this.back, this.front);
    this.height = run.height + AXIS + GAP_BELOW;
    this.tops = new Map(run.lanes.map((lane) => [`${lane.rank} ${lane.name}`, lane]));
  }

  layOut(width) {
    this.width = width;
    for (const canvas of [this.back, this.front]) {
      canvas.width = width * devicePixelRatio;
      canvas.height = this.height * devicePixelRatio;
      canvas.style.height = `${this.height}px`;
    }
    this.drawn = "";
  }

  x(time) { return LABELS + ((time - this.from) / (this.to - this.from)) * (this.width - LABELS - 2); }

  timeAt(x) { return this.from + ((x - LABELS) / (this.width - LABELS - 2)) * (this.to - this.from); }

  /** Show a moment, in a window of time. */
  show(clock, time, from, to) {
    Object.assign(this, {clock, time, from, to});
    const key = `${clock} ${from} ${to} ${this.chosen} ${this.width}`;
    if (key !== this.drawn) {
      this.colours = colours(this.root);
      this.drawBack();
      this.drawn = key;
    }
    this.drawFront();
  }

  context(canvas) {
    const context = canvas.getContext("2d");
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    context.font = '12px ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace';
    context.textBaseline = "middle";
    return context;
  }

  drawBack() {
    const context = this.context(this.back);
    for (const {rank, name, top, height} of this.run.lanes) {
      context.fillStyle = this.colours("idle");
      context.fillRect(LABELS, top, this.width - LABELS, height);
      context.fillStyle = this.colours("ink");
      const label = name === "main" ? `rank ${this.run.ranks[rank].rank}` : ` ${name}`;
      context.fillText(label, 0, top + height / 2, LABELS - 4);
    }
    context.save();
    context.beginPath();
    context.rect(LABELS, 0, this.width - LABELS, this.height);
    context.clip();
    this.run.ranks.forEach((_, rank) => this.drawBars(context, rank));
    this.drawArrows(context, this.run.arrowsBetween(this.clock, this.from, this.to), 1);
    context.restore();
    this.drawAxis(context);
  }

  drawBars(context, rank) {
    const {run, clock} = this, begin = run.begin[clock], finish = run.finish[clock];
    const first = run.firsts[rank], end = run.firsts[rank + 1] ?? run.size;
    const filled = new Map();
    for (let place = first; place < end && begin[place] <= this.to; place++) {
      if (finish[place] < this.from) continue;
      const what = run.what(place);
      if (!what.style) continue;
      const left = Math.max(this.x(begin[place]), LABELS - 2), right = Math.min(this.x(finish[place]), this.width + 2);
      if (right < (filled.get(what.top) ?? -1) + 1 && place !== this.chosen) continue;
      filled.set(what.top, Math.max(right, left + 1));
      this.drawBar(context, place, what, left, Math.max(right - left, 1));
    }
  }

  drawBar(context, place, what, left, width) {
    context.fillStyle = this.colours(what.style.replaceAll(" ", "-"));
    context.fillRect(left, what.top, width, this.run.bar);
    if (width > 3) {
      context.strokeStyle = this.colours(place === this.chosen ? "ink" : "muted");
      context.lineWidth = place === this.chosen ? 3 : 0.5;
      context.strokeRect(left, what.top + 0.5, width, this.run.bar - 1);
    }
    const room = Math.floor((width - 4) / LETTER), name = what.name;
    if (room > 2) {
      context.fillStyle = this.colours("ink");
      const text = name.length > room ? `${name.slice(0, room - 1)}…` : name;
      context.fillText(text, left + 3, what.top + this.run.bar / 2 + 1);
    }
  }

  drawArrows(context, arrows, width) {
    context.strokeStyle = context.fillStyle = this.colours("message");
    context.lineWidth = width;
    context.beginPath();
    const every = Math.ceil(arrows.length / MOST_ARROWS);
    for (let i = 0; i < arrows.length; i += every) this.drawArrow(context, arrows[i]);
    context.stroke();
    context.fill();
  }

  drawArrow(context, arrow) {
    const {run, clock} = this, from = run.rankOf[run.sent[arrow]], to = run.rankOf[run.received[arrow]];
    const arrived = run.arrived(clock, arrow);
    const x = this.x(run.begin[clock][run.sent[arrow]]), toX = this.x(Math.min(arrived, run.length[clock]));
    const a = this.tops.get(`${from} main`), b = this.tops.get(`${to} main`);
    const [y, toY] = b.top > a.top ? [a.top + a.height, b.top] : [a.top, b.top + b.height];
    context.moveTo(x, y);
    context.lineTo(toX, toY);
    if (arrived === Infinity) return;
    const angle = Math.atan2(toY - y, toX - x);
    for (const turn of [-0.4, 0.4]) {
      context.moveTo(toX, toY);
      context.lineTo(toX - 7 * Math.cos(angle + turn), toY - 7 * Math.sin(angle + turn));
    }
  }

  drawAxis(context) {
    const y = this.run.height + AXIS / 2 + GAP_BELOW, isReal = this.clock === "real";
    const every = tickDistance((this.to - this.from) / (this.width > NARROW ? 10 : 4), isReal ? 0 : 1);
    context.fillStyle = this.colours("muted");
    context.textAlign = "center";
    for (let tick = Math.ceil(this.from / every) * every; tick <= this.to; tick += every) {
      const x = this.x(isReal ? tick : tick + 0.5);
      const text = isReal ? formatTime(Math.round(tick)) : formatNumber(tick + 1);
      if (x > LABELS - 2 && x < this.width) context.fillText(text, x, y);
    }
    context.textAlign = "start";
  }

  drawFront() {
    const context = this.context(this.front), x = this.x(this.time);
    if (x < LABELS || x > this.width) return;
    this.drawArrows(context, this.run.arrowsBetween(this.clock, this.time, this.time), 3);
    context.fillStyle = this.colours("chunk");
    context.fillRect(x - 1, 0, 2, this.run.height + GAP_BELOW);
  }

  press(event) {
    if (event.offsetX < LABELS) return;
    this.pressed = event.offsetX;
    this.front.setPointerCapture(event.pointerId);
  }

  drag(event) {
    if (this.pressed === undefined || Math.abs(event.offsetX - this.pressed) < NEAR) return;
    this.goTo(this.timeAt(event.offsetX));
  }

  release(event) {
    if (this.pressed !== undefined && Math.abs(event.offsetX - this.pressed) < NEAR) {
      this.goTo(this.timeAt(event.offsetX));
      const place = this.find(event.offsetX, event.offsetY);
      if (place >= 0) this.choose(place);
    }
    this.pressed = undefined;
  }

  /** The event whose bar is here, or a little beside it: the innermost; -1 if there is none. */
  find(x, y) {
    const {run, clock} = this, from = this.timeAt(x - NEAR), to = this.timeAt(x + NEAR);
    let found = -1, least = Infinity;
    for (let place = 0; place < run.size; place++) {
      if (run.begin[clock][place] > to || run.finish[clock][place] < from) continue;
      const what = run.what(place), long = run.finish[clock][place] - run.begin[clock][place];
      if (!what.style || y < what.top || y >= what.top + run.bar || long >= least) continue;
      [found, least] = [place, long];
    }
    return found;
  }
}

/** One, two or five times a power of ten: the least of them that is neither below `distance` nor below `least`. */
function tickDistance(distance, least) {
  const power = 10 ** Math.floor(Math.log10(distance));
  return Math.max(least, [1, 2, 5, 10].map((times) => times * power).find((each) => each >= distance * 0.999));
}

/** What gives the colour of a name, as the surroundings have it now: a canvas takes no variables. */
function colours(place) {
  const known = new Map();
  return (name) => {
    if (known.has(name)) return known.get(name);
    place.style.color = `var(--${name})`;
    known.set(name, getComputedStyle(place).color);
    place.style.color = "";
    return known.get(name);
  };
}
