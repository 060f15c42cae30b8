"use strict";
{
const { digits, plain, count, start } = Calculators;

/** What stage s does, in order: +m is the forward of microbatch m, -m its backward; microbatches count from 1. */
const ORDERS = {
  "naive": (s, stages, m) => Array.from({ length: m }, (_, each) => [each + 1, -each - 1]).flat(),
  "gpipe": (s, stages, m) => [...count(1, m), ...count(1, m).map((each) => -each)],
  "1f1b": (s, stages, m) => {
    const ahead = Math.min(m, stages - 1 - s);
    return [...count(1, ahead), ...count(ahead + 1, m).flatMap((each) => [each, ahead - each]), ...count(m - ahead + 1, m).map((each) => -each)];
  },
};

/** What each stage does in each slot, 0 where it idles: a forward takes one slot and a backward two. A forward follows that of the stage before, a backward that of the stage after. */
function fillSlots(schedule, stages, microbatches) {
  const orders = count(0, stages - 1).map((s) => ORDERS[schedule](s, stages, microbatches)), slots = orders.map(() => []), ends = new Map();
  while (orders.some((order) => order.length)) {
    orders.forEach((order, s) => {
      const [next] = order, source = next > 0 ? s - 1 : s + 1;
      const ready = source < 0 || source === stages ? 0 : ends.get(`${source} ${next}`);
      if (!next || ready === undefined) return;
      while (slots[s].length < ready) slots[s].push(0);
      slots[s].push(...next > 0 ? [next] : [next, next]);
      ends.set(`${s} ${next}`, slots[s].length);
      order.shift();
    });
  }
  const length = Math.max(...slots.map((row) => row.length));
  return slots.map((row) => Array.from({ length }, (_, at) => row[at] ?? 0));
}

function countHeld(order) {
  let held = 0, most = 0;
  for (const each of order) most = Math.max(most, held += Math.sign(each));
  return plain(most);
}

function pipeline({ stages, microbatches, schedule }) {
  const rows = {};
  for (const name of Object.keys(ORDERS)) {
    const length = fillSlots(name, stages, microbatches)[0].length, bubble = 1 - 3 * microbatches / length;
    rows[name] = [plain(length), [bubble, `${digits(100 * bubble)} %`], ...[0, stages - 1].map((s) => countHeld(ORDERS[name](s, stages, microbatches)))];
  }
  const [slots, bubble, held] = rows[schedule].map(([, text]) => text);
  return {
    rows,
    says: `${schedule}: stages idle for ${bubble} of ${slots} slots; the first one holds ${held} of ${microbatches} microbatches.`,
    draw: (room, width) => drawSlots(fillSlots(schedule, stages, microbatches), width),
  };
}

/** In the width that there is: with the numbers of microbatches, as long as they can be read. */
function drawSlots(slots, width) {
  const slot = Math.min(26, (width - 62) / slots[0].length), gap = Math.min(1, slot / 8);
  const write = (text, long, x, y) => slot * long < 18 ? "" : `<text class="middle" x="${x + slot * long / 2 - 0.5}" y="${y}">${text}</text>`;
  const cells = slots.map((row, s) => {
    const texts = row.map((each) => each ? `${each > 0 ? "F" : "B"}${Math.abs(each) - 1}` : ".");
    const boxes = texts.map((text, at) => {
      const long = text[0] === "B" ? 2 : 1, x = 60 + slot * at;
      return text === "." || text === texts[at - 1] ? "" :
        `<rect class="${text[0]}" x="${x}" y="${26 * s + 2}" width="${slot * long - gap}" height="24" stroke-width="${gap}"/>${write(text, long, x, 26 * s + 18)}`;
    });
    return `<g data-slots="${texts.join(" ")}"><text x="0" y="${26 * s + 18}">stage ${s}</text>${boxes.join("")}</g>`;
  });
  const bottom = 26 * slots.length, key = ["forward", "backward"].map((name, at) =>
    `<rect class="${name[0].toUpperCase()}" x="${60 + 92 * at}" y="${bottom + 6}" width="14" height="14"/><text x="${80 + 92 * at}" y="${bottom + 18}">${name}</text>`);
  return [62 + slot * slots[0].length, bottom + 24, cells.join("") + key.join("")];
}

start("pipeline", pipeline);
}
