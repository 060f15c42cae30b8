"use strict";
{
const { BINARY, SECONDS, scale, plain, count, start } = Calculators;

const power = (ranks) => 2 ** Math.floor(Math.log2(ranks));

/** Messages one after the other in a tree that is filled level by level: up, and down. */
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
    const messages = climb(n)[0] + climb(n)[1];
    return [messages, messages * bytes];
  },
  "reduce + broadcast": (n, bytes) => [2 * (n - 1), 2 * (n - 1) * bytes],
};

/** Ranks beyond a power of two hand in their tensor before, and get the result after. */
function withOthers(ranks, bytes, messages, moved) {
  return ranks > power(ranks) ? [messages + 2, moved + 2 * bytes] : [messages, moved];
}

function allreduce({ ranks, bytes, alpha: microseconds, bandwidth, algorithm }) {
  const alpha = microseconds * 1e-6, beta = 1 / (bandwidth * 1e9);
  const equal = 4 * ranks * power(ranks), rows = {};
  const seconds = (name, size) => {
    const [messages, moved] = COSTS[name](ranks, size);
    return messages * alpha + moved * beta;
  };
  const [ringMessages, ringBytes] = COSTS.ring(ranks, equal);
  for (const [name, cost] of Object.entries(COSTS)) {
    const [messages, moved] = cost(ranks, bytes), [, own] = cost(ranks, equal);
    const fewer = ringMessages - messages, more = (own - ringBytes) / equal;
    let crossover = [0, name === "ring" ? "–" : "never"];
    if (fewer > 0) crossover = more > 0 ? scale(fewer * alpha / (more * beta), BINARY) : [Infinity, "always"];
    rows[name] = [plain(messages), scale(moved, BINARY), scale(seconds(name, bytes), SECONDS), crossover];
  }
  const [from, below] = rows[algorithm][3], faster = "faster than the ring";
  const when = { never: `never ${faster}`, always: `${faster} for all sizes` }[below] ?? `${faster} below ${below}`;
  return {
    rows,
    says: `${algorithm} takes ${rows[algorithm][2][1]}, ring ${rows.ring[2][1]}: it is ${when}.`,
    draw: (room) => drawTimes(seconds, algorithm, bytes, from, room),
  };
}

/** Pixels: the axes, and the y of the most and the least time. */
const LEFT = 46, START = 10, TOP = 10, BOTTOM = 195, MOST = 20, LEAST = 190, RIGHT = 30, SIZES_AT = 208, HEIGHT = 218;
/** Bytes: powers of two from 4 B to 1 GiB. */
const FROM = 2, TO = 30, LABELS = [4, 2 ** 10, 2 ** 20, 2 ** 30];
/** The key: samples of lines, and their texts. */
const SAMPLE = [24, 52], KEY_TEXT = 60, KEY_ROW = 20, ASCENT = 4;

const text = (words, x, y, name = "") => `<text class="${name}" x="${x}" y="${y + ASCENT}">${words}</text>`;
const dot = (x, y) => `<circle cx="${x}" cy="${y}" r="6"/>`;

/** Times over sizes, both logarithmic; the chosen size; the size where both times are equal. */
function drawTimes(seconds, algorithm, bytes, crossover, width) {
  const room = width - LEFT - RIGHT, names = ["ring", algorithm], sizes = count(FROM, TO).map((power) => 2 ** power);
  const times = names.map((name) => sizes.map((size) => Math.log(seconds(name, size))));
  const low = Math.min(...times.flat()), high = Math.max(...times.flat());
  const x = (size) => START + (room - START) * (Math.log2(size) - FROM) / (TO - FROM);
  const y = (time) => LEAST - (LEAST - MOST) * (time - low) / (high - low);
  const shapes = names.flatMap((name, place) => {
    const curve = sizes.map((size, at) => [x(size), y(times[place][at])]);
    const row = KEY_ROW * (place + 1), sample = SAMPLE.map((end) => [end, row]);
    const lines = [curve, sample].map((points) => `<polyline class="line${place}" points="${points}"/>`);
    return [...lines, text(name, KEY_TEXT, row)];
  });
  if (crossover > sizes[0] && crossover < sizes.at(-1)) {
    const row = KEY_ROW * 3, at = scale(crossover, BINARY)[1];
    shapes.push(dot(x(crossover), y(Math.log(seconds("ring", crossover)))), dot((SAMPLE[0] + SAMPLE[1]) / 2, row));
    shapes.push(text(`equal at ${at}`, KEY_TEXT, row));
  }
  for (const size of LABELS)
    shapes.push(text(scale(size, BINARY)[1], x(size), SIZES_AT, size > sizes[0] ? "middle" : ""));
  for (const power of count(Math.ceil(low / Math.LN10), Math.floor(high / Math.LN10))) {
    const time = Number(`1e${power}`), at = y(Math.log(time));
    shapes.push(`<path d="M6 ${at}H${START}"/>`, text(scale(time, SECONDS)[1], 4, at, "end"));
  }
  const chosen = `<line x1="${x(bytes)}" x2="${x(bytes)}" y1="${TOP}" y2="${BOTTOM}"/>`;
  const axes = `<path d="M${START} ${TOP}V${BOTTOM}H${room}"/>`;
  return [width, HEIGHT, `<g transform="translate(${LEFT})">${chosen}${axes}${shapes.join("")}</g>`];
}

start("allreduce", allreduce);
}
