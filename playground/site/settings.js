"use strict";
/** What the reader has chosen and done, as far as the browser keeps anything for this site. Read before the first paint. */
const settings = {
  read(name) {
    try { return JSON.parse(localStorage.getItem(`playground.${name}`)); } catch { return null; }
  },
  write(name, value) {
    try { localStorage.setItem(`playground.${name}`, JSON.stringify(value)); } catch { /* a private window keeps nothing */ }
  },
};
for (const name of ["theme", "board"]) {
  const value = settings.read(name);
  if (value) document.documentElement.dataset[name] = value;
}
