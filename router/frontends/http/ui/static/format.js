// Numbers as people read them. A dash stands for what is not known.

export const MISSING = "–";
const known = (value) => typeof value === "number" && Number.isFinite(value);

/** Three digits, more only where the number is larger. */
export function number(value) {
  if (!known(value)) return MISSING;
  if (value === 0) return "0";
  if (Math.abs(value) >= 100) return Math.round(value).toLocaleString("en");
  return value.toFixed(Math.abs(value) >= 10 ? 1 : 2).replace(/\.?0+$/, "") || "0";
}

export function count(value) {
  return known(value) ? Math.round(value).toLocaleString("en") : MISSING;
}

export function seconds(value) {
  if (!known(value)) return MISSING;
  if (value >= 1) return `${number(value)} s`;
  return value >= 0.001 ? `${number(value * 1e3)} ms` : `${Math.round(value * 1e6)} µs`;
}

export function bytes(value) {
  if (!known(value)) return MISSING;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? Math.round(value) : number(value)} ${units[unit]}`;
}

export const bytesPerSecond = (value) => (known(value) ? `${bytes(value)}/s` : MISSING);

export function share(value) {
  return known(value) ? `${Math.round(value * 100)}%` : MISSING;
}

export function duration(value) {
  if (!known(value)) return MISSING;
  const minutes = Math.floor(value / 60);
  if (minutes < 1) return `${Math.floor(value)} s`;
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}
