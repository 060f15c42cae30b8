"use strict";
{
const { BINARY, SECONDS, scale, plain, count, start } = Calculators;

const power = (ranks) => 2 ** Math.floor(Math.log2(ranks));

/** Of a tree that is filled level by level: messages one after the other on the way up, and down. */
function climb(ranks) {
  if (ranks === 1) return [0, 0];
  const lowest = power(ranks);
  const left = lowest / 2 - 1 + Math.min(ranks - lowest + 1, lowest / 2);
  const right = ranks - 1 - left;
  const [up, down] = climb(left), [otherUp, otherDown] = right ? climb(right) : [-1, -2];
  return [up + 1 + (otherUp === up ? 1 : 0), Math.max(1 + down, 2 + otherDown)];
}

/** Messages that follow one another, and their bytes. */
const COSTS = {
  "ring": (n, bytes) => [2 * (n - 1), 2 * (n - 1) * 4 * Math.ceil(Math.ceil(bytes / 4) / n)],
  "recursive doubling": (n, bytes) => withOthers(n, bytes, Math.log2(power(n)), Math.log2(power(n)) * bytes),
  "halving-doubling": (n, bytes) =>
    withOthers(n, bytes, 2 * Math.log2(power(n)), 2 * bytes * (power(n) - 1) / power(n)),
  "binary tree": (n, bytes) => {
    const [up, down] = climb(n);
    return [up + down, (up + down) * bytes];
  },
  "reduce + broadcast": (n, bytes) => [2 * (n - 1), 2 * (n - 1) * bytes],
};

/** Ranks beyond a power of two hand in their tensor before, and get the result after. */
function withOthers(ranks, bytes, messages, moved) {
  return ranks > power(ranks) ? [messages + 2, moved + 2 * bytes] : [messages, moved];
}

function allreduce({ ranks, bytes, alpha: microseconds, bandwidth, algorithm }) {
  const alpha = microseconds * 1e-6, beta = 1 / (bandwidth * 1e9);
  const equal = 4 * ranks * power(ranks), rows = {};  // bytes of equal chunks
  const seconds = (name, size) => {
    const [messages, moved] = COSTS[name](ranks, size);
    return messages * alpha + moved * beta;
  };
  const [ringMessages, ringBytes] = COSTS.ring(ranks, equal);
  for (const [name, cost] of Object.entries(COSTS)) {
    const [messages, moved] = cost(ranks, bytes), [, own] = cost(ranks, equal);
    const fewer = ringMessages - messages, more = (own - ringBytes) / equal;
    let crossover = [0, "never"];
    if (fewer > 0) crossover = more > 0 ? scale(fewer * alpha / (more * beta), BINARY) : [Infinity, "always"];
    rows[name] = [plain(messages), scale(moved, BINARY), scale(seconds(name, bytes), SECONDS), crossover];
  }
  const [from, text] = rows[algorithm][3];
  const always = { never: "never faster than the ring", always: "faster than the ring for all sizes" };
  const when = always[text] ?? `faster than the ring below ${text}`;
  return {
    rows,
    says: `${algorithm} takes ${rows[algorithm][2][1]}, ring ${rows.ring[2][1]}: it is ${when}.`,
    draw: (room) => drawTimes(seconds, algorithm, bytes, from, room),
  };
}

/** The drawing, in pixels: the labels of times at the left, the axes, and the labels of sizes below. */
const LEFT = 46, TOP = 10, BOTTOM = 195, SIZES_AT = 212, HEIGHT = 218;
/** The curves: where they begin, what is beside them at both ends, and the y of the most and the least time. */
const START = 10, BESIDE = 40, MOST = 20, LEAST = 190;
/** The axis of sizes: from 4 B to 1 GiB, as powers of two, and those that have a label. */
const FROM = 2, TO = 30, LABELLED = [2, 10, 20, 30];
/** The key: a sample of each line, its text, and the distance of its rows. */
const SAMPLE = [24, 52], KEY_TEXT = 60, KEY_TOP = 20, KEY_ROW = 20, ASCENT = 4, DOT = 6;

/** Times over sizes, both logarithmic: the ring, the other, the size that is chosen, and where the two are equal. */
function drawTimes(seconds, algorithm, bytes, crossover, width) {
  const room = width - LEFT, names = ["ring", algorithm];
  const sizes = count(FROM, TO).map((power) => 2 ** power);
  const times = names.map((name) => sizes.map((size) => seconds(name, size)));
  const low = Math.log(Math.min(...times.flat())), high = Math.log(Math.max(...times.flat()));
  const x = (size) => START + (room - BESIDE) * (Math.log2(size) - FROM) / (TO - FROM);
  const y = (time) => LEAST - (LEAST - MOST) * (Math.log(time) - low) / (high - low);
  const lines = names.map((name, place) => {
    const points = sizes.map((size, at) => `${x(size)},${y(times[place][at])}`).join(" ");
    const row = KEY_TOP + KEY_ROW * place, sample = SAMPLE.map((end) => `${end},${row}`).join(" ");
    const line = `<polyline class="line${place}" points="${points}"/>`;
    return `${line}<polyline class="line${place}" points="${sample}"/>${keyText(row, name)}`;
  });
  const isShown = crossover > 2 ** FROM && crossover < 2 ** TO;
  const mark = isShown ? drawCrossover(x(crossover), y(seconds("ring", crossover)), crossover) : "";
  const labels = LABELLED.map((power) => {
    const name = power > FROM ? "middle" : "";
    return `<text class="${name}" x="${x(2 ** power)}" y="${SIZES_AT}">${scale(2 ** power, BINARY)[1]}</text>`;
  });
  const ends = [low, high].map((time, at) => {
    const height = LEAST + ASCENT - (LEAST - MOST) * at;
    return `<text class="end" x="6" y="${height}">${scale(Math.exp(time), SECONDS)[1]}</text>`;
  });
  const chosen = `<line x1="${x(bytes)}" x2="${x(bytes)}" y1="${TOP}" y2="${BOTTOM}"/>`;
  const axes = `<path d="M${START} ${TOP}V${BOTTOM}H${room - BESIDE + START}"/>`;
  const shapes = [...ends, chosen, axes, ...lines, mark, ...labels].join("");
  return [width, HEIGHT, `<g transform="translate(${LEFT})">${shapes}</g>`];
}

/** The point where both take the same time, and its row of the key. */
function drawCrossover(x, y, bytes) {
  const row = KEY_TOP + 2 * KEY_ROW, middle = (SAMPLE[0] + SAMPLE[1]) / 2;
  const dots = [[x, y], [middle, row]].map((at) => `<circle cx="${at[0]}" cy="${at[1]}" r="${DOT}"/>`);
  return `${dots.join("")}${keyText(row, `equal at ${scale(bytes, BINARY)[1]}`)}`;
}

function keyText(row, text) {
  return `<text x="${KEY_TEXT}" y="${row + ASCENT}">${text}</text>`;
}

start("allreduce", allreduce);
}
