/** The parts of the page, which all show the same moment. */
class View {
  constructor(player, run) {
    Object.assign(this, {player, run, selected: 0, chosen: -1});
    this.stage = new Stage(run);
    this.timeline = new Timeline(run, (time) => player.goTo(time), (place) => this.choose(place));
    this.ranks = new Ranks(run, (rank) => this.select(rank), (wait) => this.waits.explain(wait));
    this.source = new Source(run);
    this.waits = new Waits(run, (place) => this.visit(place));
    this.root = element("section", {class: "run", "aria-label": `Run: ${run.command}`},
      element("div", {class: "wide"}, this.timeline.root, player.controls.status, ...this.warn()),
      element("figure", {}, this.stage.svg, this.stage.caption),
      element("div", {class: "scroll", tabindex: 0}, this.ranks.root),
      element("p", {class: "wide muted facts"}, this.describe()),
      element("details", {class: "wide", ...(player.isAlone && {open: ""})},
        element("summary", {}, "Waits, and the program"),
        element("div", {class: "run"}, this.waits.root, this.source.root)));
  }

  /** What was run. */
  describe() {
    const {run} = this, versions = Object.entries(run.versions).map((pair) => pair.join(" "));
    const what = [`${run.ranks.length} ranks on ${run.backend}`, `${run.size} events in ${formatTime(run.end)}`];
    return [...what, `recorded ${run.began}`, ...versions].join(" · ");
  }

  /** Why it stood still, and what of it is missing. */
  warn() {
    const {run} = this, cut = run.ranks.filter((rank) => rank.cutOff).map((rank) => rank.rank);
    const dropped = run.ranks.reduce((sum, rank) => sum + rank.dropped, 0);
    const missing = [dropped && `${dropped} events were dropped: there was no room for them.`,
      cut.length && `Cut off before its end: rank ${cut.join(", ")}.`,
      run.leftOut && `Of ${run.leftOut} tensors the values are left out: the page would be too large.`];
    return [...this.tellStandstill(),
      ...missing.filter(Boolean).map((text) => element("p", {class: "warning"}, text))];
  }

  /** The diagnosis of a run that stood still, and how to fix it, as the command says it. */
  tellStandstill() {
    const {standstill, ended} = this.run;
    if (!standstill) return ended ? [element("p", {class: "warning"}, `It failed: ${ended}`)] : [];
    const {sentence, cure} = standstill;
    const fix = element("div", {class: "cure"}, cure);
    return [element("p", {class: "warning"}, element("strong", {}, sentence), fix)];
  }

  layOut() {
    this.stage.layOut(Math.max(200, this.stage.svg.clientWidth));
    this.ranks.layOut();
    this.timeline.layOut(Math.max(200, this.timeline.root.clientWidth));
  }

  /** Give all that changes in height the height of its longest at these moments. */
  reserve(clock, moments) {
    const told = longest(moments, (time) => this.stage.tell(clock, time));
    reserve([this.stage.caption], told.length, (i) => write(this.stage.caption, this.stage.tell(clock, told[i])));
    this.ranks.reserve(clock, moments);
  }

  show(clock, time, from, to, isMoving) {
    this.stage.show(clock, time, isMoving);
    this.timeline.show(clock, time, from, to);
    this.ranks.show(clock, time, this.selected);
    this.source.show(clock, time, this.selected, this.chosen < 0 ? null : this.run.what(this.chosen).source);
  }

  select(rank) {
    this.selected = rank;
    this.mark(-1);
    this.player.show();
  }

  /** An event is what we look at, until we go elsewhere. */
  mark(place) {
    this.chosen = this.timeline.chosen = place;
  }

  visit(place) {
    this.selected = this.run.rankOf[place];
    this.player.goTo(this.player.timeOf(place));
    this.mark(place);
    this.player.show();
  }

  choose(place) {
    const wait = this.run.waitOf.get(place);
    if (wait === undefined) this.visit(place); else this.waits.explain(wait);
  }

  /** The moment in words: messages that are under way, ranks that wait. */
  tell(clock, time) {
    const {run} = this, said = run.arrowsBetween(clock, time, time).map((arrow) => {
      const sent = run.sent[arrow], received = run.received[arrow];
      return `rank ${run.rankOf[sent]} → rank ${run.rankOf[received]}: ${formatCargo(run, sent)}`;
    });
    run.ranks.forEach((rank, index) => {
      const doing = formatDoing(run, clock, index, time);
      if (doing) said.push(`rank ${rank.rank}: ${doing}`);
    });
    const most = this.root.clientWidth < NARROW ? MOST_SAID_NARROW : MOST_SAID;
    const more = said.length > most ? `; and ${said.length - most} more` : "";
    return (said.length ? said.slice(0, most).join("; ") : "nothing is recorded at this moment") + more;
  }
}

/** Which moment is shown, and how it moves. */
class Player {
  /** `place`: the element with the controls. A player that is in no figure has the keys of the whole page. */
  constructor(run, place) {
    Object.assign(this, {run, place, isAlone: !place.closest("figure")});
    Player.all.push(this);
    this.clock = "logical";
    this.time = 0;
    this.isPlaying = false;
    this.controls = Object.fromEntries(Array.from(place.querySelectorAll("[name]"), (each) => [each.name, each]));
    this.controls.status = place.querySelector(".status");
    this.view = new View(this, run);
    place.querySelector(".runs").append(this.view.root);
    this.listen();
    this.changeClock("logical");
    this.goTo(this.findBeginning());
    performance.mark("usable");
    new ResizeObserver(([{contentRect: {width}}]) => {
      if (width === this.width) return;
      this.width = width;
      this.layOut();
      this.show();
    }).observe(place.querySelector(".runs"));
  }

  listen() {
    const click = (name, action) => this.controls[name].addEventListener("click", action);
    click("first", () => this.goTo(this.start()));
    click("last", () => this.goTo(this.length()));
    click("back", () => this.step(-1));
    click("forward", () => this.step(1));
    click("play", () => this.toggle());
    click("narrower", () => this.zoom(0.5));
    click("wider", () => this.zoom(2));
    click("whole", () => this.zoom(Infinity));
    this.controls.speed.addEventListener("change", () => this.show());
    this.controls.clock.addEventListener("change", (event) => this.changeClock(event.target.value));
    this.controls.position.addEventListener("input", (event) => this.goTo(Number(event.target.value)));
    document.addEventListener("keydown", (event) => { if (this.hasKeys()) this.press(event); });
    const redraw = () => { this.layOut(); this.show(); };
    for (const query of ["(prefers-color-scheme: dark)", "(resolution: 1dppx)"]) {
      matchMedia(query).addEventListener("change", redraw);
    }
    new MutationObserver(redraw).observe(document.documentElement, {attributeFilter: ["data-theme"]});
  }

  /** On a page with a text, keys are for the player that was used last, while it is in sight. */
  hasKeys() {
    const {top, bottom} = this.place.getBoundingClientRect();
    return this.isAlone || (Player.current === this && bottom > 0 && top < innerHeight);
  }

  /** The reader works with this player, or with none. */
  static turnTo(player) {
    if (Player.current === player) return;
    Player.current = player;
    if (!player) return;
    player.view.source.shown = null;
    player.show();
  }

  press(event) {
    const {tagName} = event.target;
    if (event.ctrlKey || event.altKey || event.metaKey || tagName === "SELECT") return;
    const actions = {
      ArrowLeft: () => this.step(-1),
      ArrowRight: () => this.step(1),
      Home: () => this.goTo(this.start()),
      End: () => this.goTo(this.length()),
      "+": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      0: () => this.zoom(Infinity),
      t: () => this.changeClock(this.clock === "real" ? "logical" : "real"),
      w: () => this.explainLongest(),
    };
    if (!["BUTTON", "SUMMARY"].includes(tagName)) actions[" "] = () => this.toggle();
    const action = actions[event.key];
    if (!action || (tagName === "PRE" && event.key !== " ")) return;
    event.preventDefault();
    action();
  }

  explainLongest() {
    if (this.run.waits.length) this.view.waits.explain(0);
  }

  length() { return this.run.length[this.clock]; }

  start() { return this.clock === "real" ? 0 : 0.5; }

  /** When an event is to be looked at. A logical step is looked at in its middle, while its messages are under way. */
  timeOf(place) { return this.run.begin[this.clock][place] + (this.clock === "real" ? 0 : 0.5); }

  /** Where to begin: where the page says; at the end of a run that stood still; else at the first step. A page of a run
   * alone begins at the first training step, and shows a few of them. */
  findBeginning() {
    const {run} = this;
    if (run.opens !== null) return this.timeOf(run.opens);
    if (run.standstill) return this.length();
    const step = this.isAlone ? run.firstTrainingStep() : undefined;
    if (step === undefined) return this.time;
    const from = run.begin.logical[step], long = run.finish.logical[step] - from;
    if (Number.isFinite(long)) this.window = [from, Math.min(from + STEPS_AT_FIRST * (long + 1), this.length())];
    return this.timeOf(step);
  }

  /** Moments to stop at: the middle of every logical step, or whenever anything begins or ends. */
  findStops() {
    if (this.clock === "logical") return Float64Array.from({length: this.length()}, (_, step) => step + 0.5);
    const {begin, finish} = this.run, moments = Float64Array.from([...begin.real, ...finish.real]).sort();
    return moments.filter((time, index) => Number.isFinite(time) && (index === 0 || time !== moments[index - 1]));
  }

  changeClock(clock) {
    const share = this.time / this.length();
    this.clock = this.controls.clock.value = clock;
    this.stops = this.findStops();
    this.window = [0, this.length()];
    this.controls.position.max = this.length();
    this.layOut();
    const index = Math.min(this.stops.length - 1, Math.floor(share * this.stops.length));
    this.goTo(clock === "logical" ? this.stops[Math.max(0, index)] ?? 0 : share * this.length());
  }

  goTo(time) {
    this.time = Math.min(Math.max(time, 0), this.length());
    this.view.mark(-1);
    this.follow();
    this.show();
  }

  step(by) {
    this.pause();
    const at = lastUpTo(this.stops.length, (i) => this.stops[i], this.time);
    const next = by > 0 ? at + 1 : this.stops[at] < this.time ? at : at - 1;
    this.goTo(this.stops[Math.min(Math.max(next, 0), this.stops.length - 1)] ?? 0);
  }

  zoom(by) {
    const long = Math.min(this.length(), Math.max((this.window[1] - this.window[0]) * by, this.length() / 1e6));
    const from = Math.min(Math.max(this.time - long / 2, 0), this.length() - long);
    this.window = [from, from + long];
    this.show();
  }

  /** Keep in sight where we are. */
  follow() {
    const [from, to] = this.window, long = to - from;
    if (this.time >= from && this.time <= to) return;
    const start = Math.min(Math.max(this.time - long / 8, 0), this.length() - long);
    this.window = [start, start + long];
  }

  toggle() { if (this.isPlaying) this.pause(); else this.play(); }

  play() {
    if (this.time >= this.stops.at(-1)) this.time = 0;
    this.isPlaying = true;
    this.showPlaying();
    this.last = performance.now();
    this.next = requestAnimationFrame((now) => this.advance(now));
  }

  pause() {
    if (!this.isPlaying) return;
    this.isPlaying = false;
    cancelAnimationFrame(this.next);
    this.showPlaying();
    this.show();
  }

  showPlaying() {
    write(this.controls.play, this.isPlaying ? "Pause" : "Play");
    // A screen reader that was told every moment of a film would never be done.
    this.controls.status.setAttribute("aria-live", this.isPlaying ? "off" : "polite");
  }

  /** How much time goes by in a second of playing, at speed 1: a step, or a run in twenty seconds. */
  rate() { return this.clock === "real" ? this.length() / REAL_SECONDS : 1; }

  advance(now) {
    const passed = ((now - this.last) / 1000) * Number(this.controls.speed.value);
    if (!IS_STILL.matches || passed >= 1) this.moveBy((IS_STILL.matches ? 1 : passed) * this.rate(), now);
    if (this.time >= this.length()) this.pause();
    else if (this.isPlaying) this.next = requestAnimationFrame((then) => this.advance(then));
  }

  moveBy(time, now) {
    this.last = now;
    this.goTo(this.time + time);
  }

  layOut() {
    const every = Math.ceil(this.stops.length / MOST_MEASURED);
    const moments = [...this.stops].filter((_, index) => index % every === 0);
    this.view.layOut();
    this.view.reserve(this.clock, moments);
    const {status} = this.controls, told = longest(moments, (time) => this.tell(time));
    reserve([status], told.length, (i) => write(status, this.tell(told[i])));
  }

  show() {
    const isMoving = !IS_STILL.matches;
    this.view.show(this.clock, this.time, ...this.window, isMoving);
    const {position, status} = this.controls, where = this.describeTime(this.time);
    position.value = this.time;
    position.setAttribute("aria-valuetext", where);
    write(status, this.tell(this.time));
  }

  tell(time) { return `${this.describeTime(time)}. ${this.view.tell(this.clock, time)}`; }

  describeTime(time) {
    if (this.clock === "logical") return `Step ${Math.min(Math.floor(time) + 1, this.length())} of ${this.length()}`;
    const slower = formatTime(this.rate() * Number(this.controls.speed.value));
    return `${formatTime(time)} of ${formatTime(this.length())} (a second is ${slower} of the run)`;
  }
}

Player.all = [];
for (const kind of ["pointerdown", "focusin"]) {
  document.addEventListener(kind, ({target}) =>
    Player.turnTo(Player.all.find(({place}) => place.contains(target)) ?? null));
}
for (const place of document.querySelectorAll(".player")) {
  Run.read(JSON.parse(place.querySelector("script").textContent)).then((run) => new Player(run, place));
}
