"use strict";
{
const { BINARY, SECONDS, scale, plain, count, start } = Calculators;

const power = (ranks) => 2 ** Math.floor(Math.log2(ranks));

/** Of a tree that is filled level by level: messages one after the other on the way up, and down. */
function climb(ranks) {
  if (ranks === 1) return [0, 0];
  const lowest = power(ranks), left = lowest / 2 - 1 + Math.min(ranks - lowest + 1, lowest / 2), right = ranks - 1 - left;
  const [up, down] = climb(left), [otherUp, otherDown] = right ? climb(right) : [-1, -2];
  return [up + 1 + (otherUp === up ? 1 : 0), Math.max(1 + down, 2 + otherDown)];
}

/** Messages that follow one another, and their bytes. */
const COSTS = {
  "ring": (n, bytes) => [2 * (n - 1), 2 * (n - 1) * 4 * Math.ceil(Math.ceil(bytes / 4) / n)],
  "recursive doubling": (n, bytes) => withOthers(n, bytes, Math.log2(power(n)), Math.log2(power(n)) * bytes),
  "halving-doubling": (n, bytes) => withOthers(n, bytes, 2 * Math.log2(power(n)), 2 * bytes * (power(n) - 1) / power(n)),
  "binary tree": (n, bytes) => climb(n).reduce(([messages, moved], each) => [messages + each, moved + each * bytes], [0, 0]),
  "reduce + broadcast": (n, bytes) => [2 * (n - 1), 2 * (n - 1) * bytes],
};

/** Ranks beyond a power of two hand in their tensor before, and get the result after. */
function withOthers(ranks, bytes, messages, moved) {
  return ranks > power(ranks) ? [messages + 2, moved + 2 * bytes] : [messages, moved];
}

function allreduce({ ranks, bytes, alpha: microseconds, bandwidth, algorithm }) {
  const alpha = microseconds * 1e-6, beta = 1 / (bandwidth * 1e9), equal = 4 * ranks * power(ranks), rows = {};
  const seconds = (name, size) => {
    const [messages, moved] = COSTS[name](ranks, size);
    return messages * alpha + moved * beta;
  };
  const [ringMessages, ringBytes] = COSTS.ring(ranks, equal);
  for (const [name, cost] of Object.entries(COSTS)) {
    const [messages, moved] = cost(ranks, bytes), [, own] = cost(ranks, equal);
    const fewer = ringMessages - messages, more = (own - ringBytes) / equal;
    const crossover = name === "ring" ? [0, "–"] : fewer <= 0 ? [0, "never"] : more > 0 ? scale(fewer * alpha / (more * beta), BINARY) : [Infinity, "always"];
    rows[name] = [plain(messages), scale(moved, BINARY), scale(seconds(name, bytes), SECONDS), crossover];
  }
  const [from, text] = rows[algorithm][3], when = { never: "never faster than the ring", always: "faster than the ring for all sizes" }[text] ?? `faster than the ring below ${text}`;
  return {
    rows,
    says: `${algorithm} takes ${rows[algorithm][2][1]}, ring ${rows.ring[2][1]}: it is ${when}.`,
    draw: (room) => drawTimes(seconds, algorithm, bytes, from, room),
  };
}

/** Times over sizes, both logarithmic: the ring, the other, the size that is chosen, and where the two are equal. */
function drawTimes(seconds, algorithm, bytes, crossover, width) {
  const left = 46, room = width - left;
  const sizes = count(2, 30).map((each) => 2 ** each), names = ["ring", algorithm], times = names.map((name) => sizes.map((size) => seconds(name, size)));
  const low = Math.log(Math.min(...times.flat())), high = Math.log(Math.max(...times.flat()));
  const x = (size) => 10 + (room - 40) * (Math.log2(size) - 2) / 28, y = (time) => 190 - 170 * (Math.log(time) - low) / (high - low);
  const lines = names.map((name, place) => {
    const points = sizes.map((size, at) => `${x(size)},${y(times[place][at])}`).join(" ");
    return `<polyline class="line${place}" points="${points}"/><polyline class="line${place}" points="24,${20 + 20 * place} 52,${20 + 20 * place}"/><text x="60" y="${24 + 20 * place}">${name}</text>`;
  });
  const isShown = crossover > 4 && crossover < 2 ** 30;
  const mark = isShown ? `<circle cx="${x(crossover)}" cy="${y(seconds("ring", crossover))}" r="6"/><circle cx="38" cy="60" r="6"/><text x="60" y="64">equal at ${scale(crossover, BINARY)[1]}</text>` : "";
  const axis = [2, 10, 20, 30].map((each) => `<text class="${each > 2 ? "middle" : ""}" x="${x(2 ** each)}" y="212">${scale(2 ** each, BINARY)[1]}</text>`);
  const decades = count(Math.ceil(low / Math.LN10), Math.floor(high / Math.LN10)).map((power) => Number(`1e${power}`));
  const ticks = decades.map((time) => `<path d="M6 ${y(time)}H10"/><text class="end" x="4" y="${y(time) + 4}">${scale(time, SECONDS)[1]}</text>`).join("");
  return [width, 218, `<g transform="translate(${left})">${ticks}<line x1="${x(bytes)}" x2="${x(bytes)}" y1="10" y2="195"/><path d="M10 10V195H${room - 30}"/>${lines.join("")}${mark}${axis.join("")}</g>`];
}

start("allreduce", allreduce);
}
