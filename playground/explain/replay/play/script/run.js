/** The page has rows without names (play/columns.py); these functions make objects of them. */
const toWhat = ([kind, name, lane, style, top, isWaitedFor, peer, bytes, shape, source, group]) =>
  ({kind, name, lane, style, top, isWaitedFor, peer, bytes, shape, source, group});
const toSource = ([file, line, name]) => ({file, line, name});
const toLane = ([rank, name, top, height]) => ({rank, name, top, height});
const toChange = ([place, isAtEnd, vector]) => ({place, isAtEnd, vector});
/** A wait: its event, the event of another rank that it is for, or null, the cause, and how late that one was. */
const toWait = (causes) => ([place, awaited, cause, late]) => ({place, awaited, cause: causes[cause], late});
/** What caused a wait: the waits after it, and the work that ends the chain, if it is known. */
const toChain = (causes) => ([waits, place, from, to, isRecorded]) =>
  ({waits: waits.map(toWait(causes)), work: place === undefined ? null : {place, from, to, isRecorded}});

/** The place of the last of `count` ascending numbers that is not above `limit`; -1 if all are. */
function lastUpTo(count, at, limit) {
  let low = 0, high = count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (at(middle) <= limit) low = middle + 1; else high = middle;
  }
  return low - 1;
}

/** The JSON that was deflated and written in base64. */
async function inflate(packed) {
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
}

/** A recorded run, in arrays by event. There are two clocks: `real`, in nanoseconds, and `logical`, in steps. */
class Run {
  /** A run from what the page has of it (play/columns.py). */
  static async read(data) {
    const columns = await Promise.all(data.ranks.map((rank) => inflate(rank.packed)));
    return new Run({...data, texts: await inflate(data.texts)}, columns);
  }

  constructor(data, columns) {
    Object.assign(this, data);
    this.whats = data.whats.map(toWhat);
    this.sources = data.sources.map(toSource);
    this.lanes = data.lanes.map(toLane);
    this.holdings = data.holdings.map((changes) => changes.map(toChange));
    this.waits = data.waits.map(toWait(data.causes));
    this.chains = data.chains.map(toChain(data.causes));
    this.size = columns.reduce((sum, {what}) => sum + what.length, 0);
    const times = () => ({real: new Float64Array(this.size), logical: new Float64Array(this.size)});
    this.begin = times();
    this.finish = times();
    this.rankOf = new Uint32Array(this.size);
    this.up = new Int32Array(this.size);
    this.whatOf = new Uint32Array(this.size);
    this.firsts = [];
    this.main = data.ranks.map(() => []);
    let place = 0;
    columns.forEach((each, index) => { place = this.unpack(each, index, place); });
    this.vectors = data.vectors.map((vector) => vector.map(Number));
    this.valuesOf = new Map(data.valuesOf);
    this.waitOf = new Map(this.waits.map((wait, index) => [wait.place, index]));
    this.unpackArrows(data.arrows);
    this.length = {real: data.end, logical: data.steps + 1};
  }

  unpack(columns, index, place) {
    let start = 0, step = 0;
    this.firsts.push(place);
    for (let i = 0; i < columns.what.length; i++, place++) {
      start += columns.start[i];
      step += columns.step[i];
      this.rankOf[place] = index;
      this.whatOf[place] = columns.what[i];
      this.up[place] = columns.up[i] ? place - columns.up[i] : -1;
      this.begin.real[place] = start;
      this.begin.logical[place] = step;
      this.finish.real[place] = columns.long[i] < 0 ? Infinity : start + columns.long[i];
      this.finish.logical[place] = columns.steps[i] < 0 ? Infinity : step + columns.steps[i];
      if (this.what(place).lane === "main") this.main[index].push(place);
    }
    return place;
  }

  unpackArrows(differences) {
    this.sent = [];
    this.received = [];
    let place = 0;
    for (let i = 0; i < differences.length; i += 2) {
      place += differences[i];
      this.sent.push(place);
      this.received.push(place + differences[i + 1]);
    }
    this.arrows = {};
    this.longestArrow = {};
    for (const clock of ["real", "logical"]) {
      const began = (arrow) => this.begin[clock][this.sent[arrow]];
      this.arrows[clock] = Uint32Array.from(this.sent.keys()).sort((a, b) => began(a) - began(b));
      const long = (arrow) => this.arrived(clock, arrow) - began(arrow);
      this.longestArrow[clock] = this.sent.reduce((most, _, arrow) => Math.max(most, long(arrow)), 0);
    }
  }

  /** The place of the first training step, of those by a way that has a name if there are any; undefined if there is
   * none. */
  firstTrainingStep() {
    const steps = [];
    for (let place = 0; place < this.size; place++) {
      const {kind, name} = this.what(place);
      if (kind === "phase" && name.endsWith("training step")) steps.push(place);
    }
    return steps.find((place) => this.what(place).name !== "training step") ?? steps[0];
  }

  what(place) { return this.whats[this.whatOf[place]]; }

  arrived(clock, arrow) { return this.finish[clock][this.received[arrow]]; }

  /** The arrows of messages that are under way at some time between these. */
  arrowsBetween(clock, from, to) {
    const arrows = this.arrows[clock], began = (index) => this.begin[clock][this.sent[arrows[index]]];
    const found = [];
    for (let i = lastUpTo(arrows.length, began, to); i >= 0 && began(i) >= from - this.longestArrow[clock]; i--) {
      if (this.arrived(clock, arrows[i]) > from) found.push(arrows[i]);
    }
    return found.reverse();
  }

  isActive(clock, place, time) {
    return this.begin[clock][place] <= time && time < this.finish[clock][place];
  }

  /** What the rank's main thread began last; -1 before it began anything. */
  lastBegun(clock, rank, time) {
    const places = this.main[rank];
    const index = lastUpTo(places.length, (i) => this.begin[clock][places[i]], time);
    return index < 0 ? -1 : places[index];
  }

  /** What the rank's main thread is in, the innermost first. What another event waits for is not what it is in. */
  stack(clock, rank, time) {
    const found = [];
    for (let place = this.lastBegun(clock, rank, time); place >= 0; place = this.up[place]) {
      if (this.isActive(clock, place, time) && !this.what(place).isWaitedFor) found.push(place);
    }
    return found;
  }

  /** The last change of what the rank holds; undefined before the first. */
  lastChange(clock, rank, time) {
    const changes = this.holdings[rank];
    const when = ({isAtEnd, place}) => (isAtEnd ? this.finish : this.begin)[clock][place];
    return changes[lastUpTo(changes.length, (i) => when(changes[i]), time)];
  }

  /** What the rank holds: numbers, null where there was no room for them, undefined where nothing is known. */
  held(clock, rank, time) {
    const change = this.lastChange(clock, rank, time);
    return change && (change.vector === null ? null : this.vectors[change.vector]);
  }

  /** The name of the collective whose result the rank holds; empty if it is no collective's. */
  resultOf(clock, rank, time) {
    const {place, isAtEnd} = this.lastChange(clock, rank, time) ?? {};
    return isAtEnd && this.what(place).kind === "collective" ? this.what(place).name : "";
  }

  /** The values of an event, or undefined. */
  values(place) {
    const vector = this.valuesOf.get(place);
    return vector === undefined ? undefined : this.vectors[vector];
  }

  /** The place of the line at which a rank is: that of the innermost event that has one. */
  sourceAt(clock, rank, time) {
    const around = this.stack(clock, rank, time).find((place) => this.what(place).source !== null);
    if (around !== undefined) return this.what(around).source;
    for (let place = this.lastBegun(clock, rank, time); place >= this.firsts[rank]; place--) {
      if (this.what(place).source !== null) return this.what(place).source;
    }
    return null;
  }

  /** Whether an event is a collective of a group of one rank, which waits for nobody. */
  isAlone(place) { return this.what(place).group.length === 1; }

  /** The collectives of the backend that ranks are in, and DDP's buckets: each with its name, its bytes, its group and
   * those ranks. A group of one rank exchanges nothing, and is left out. */
  collectives(clock, time) {
    const found = new Map();
    this.ranks.forEach((_, rank) => {
      for (const place of this.stack(clock, rank, time)) {
        const {kind, name, bytes, group} = this.what(place);
        if ((kind !== "collective" && kind !== "bucket") || this.isAlone(place)) continue;
        const key = `${name} ${bytes} ${group}`, called = kind === "bucket" ? `all_reduce of ${name}` : name;
        if (!found.has(key)) found.set(key, {name: called, bytes, group, ranks: []});
        found.get(key).ranks.push(rank);
      }
    });
    return [...found.values()];
  }
}
