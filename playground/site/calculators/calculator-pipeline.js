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

/** What each stage does in each slot, 0 where it idles: a forward follows that of the stage before, a backward that of the stage after. */
function fillSlots(schedule, stages, microbatches) {
  const orders = count(0, stages - 1).map((s) => ORDERS[schedule](s, stages, microbatches)), slots = orders.map(() => []), done = new Map();
  while (orders.some((order) => order.length)) {
    const now = slots[0].length, begun = orders.map((order, s) => {
      const before = order[0] > 0 ? s - 1 : s + 1;
      return order.length && (before < 0 || before === stages || done.get(`${before} ${order[0]}`) < now);
    });
    orders.forEach((order, s) => {
      if (begun[s]) done.set(`${s} ${order[0]}`, now);
      slots[s].push(begun[s] ? order.shift() : 0);
    });
  }
  return slots;
}

function countHeld(order) {
  let held = 0, most = 0;
  for (const each of order) most = Math.max(most, held += Math.sign(each));
  return plain(most);
}

function pipeline({ stages, microbatches, schedule }) {
  const rows = {};
  for (const name of Object.keys(ORDERS)) {
    const slots = fillSlots(name, stages, microbatches), length = slots[0].length, bubble = 1 - 2 * microbatches / length;
    rows[name] = [plain(length), [bubble, `${digits(100 * bubble)} %`], countHeld(slots[0]), countHeld(slots.at(-1))];
  }
  const [slots, bubble, held] = rows[schedule].map(([, text]) => text);
  return {
    rows,
    says: `${schedule}: stages idle for ${bubble} of ${slots} slots; the first one holds ${held} of ${microbatches} microbatches.`,
    draw: () => drawSlots(fillSlots(schedule, stages, microbatches)),
  };
}

function drawSlots(slots) {
  const cells = slots.map((row, s) => {
    const texts = row.map((each) => each ? `${each > 0 ? "F" : "B"}${Math.abs(each) - 1}` : ".");
    const boxes = texts.map((text, at) => text === "." ? "" :
      `<rect class="${text[0]}" x="${60 + 26 * at}" y="${26 * s + 2}" width="25" height="24"/><text class="middle" x="${72.5 + 26 * at}" y="${26 * s + 18}">${text}</text>`);
    return `<g data-slots="${texts.join(" ")}"><text x="0" y="${26 * s + 18}">stage ${s}</text>${boxes.join("")}</g>`;
  });
  return [62 + 26 * slots[0].length, 26 * slots.length + 4, cells.join("")];
}

start("pipeline", pipeline);
}
