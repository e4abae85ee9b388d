// Example inputs as JSON, the shape of typed JSON, and outputs as table rows. Pure functions.

const LONG = 200_000; // values beyond which an example is no text to edit

const sizes = (spec) => (spec.shape || [-1, 1]).slice(1).map((n) => (n < 0 ? 1 : n));
export const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const product = (numbers) => numbers.reduce((all, n) => all * n, 1);

/** The shape of nested lists, or what is wrong with them. */
export function shapeOf(value) {
  if (!Array.isArray(value)) return { shape: [] };
  const inside = value.map(shapeOf);
  const wrong = inside.find((one) => one.problem);
  if (wrong) return wrong;
  const other = inside.findIndex((one) => String(one.shape) !== String(inside[0].shape));
  if (other > 0) return { problem: `item ${other + 1} of a list has a different shape than the first` };
  return { shape: [value.length, ...(inside[0]?.shape ?? [])] };
}

export const shown = (shape) => (shape
  ? `[${shape.map((n, i) => (n >= 0 ? n : i === 0 ? "rows" : "any")).join(", ")}]` : "any shape");

export const fits = (shape, spec) => !spec.shape || (shape.length === spec.shape.length
  && spec.shape.every((n, i) => i === 0 || n < 0 || n === shape[i]));

function value(dtype, fill, at) {
  if (dtype === "object") return "text";
  if (dtype === "bool") return fill === "zeros" ? false : at % 2 === 0;
  const whole = /int/.test(dtype || "");
  if (fill === "zeros") return 0;
  if (fill === "random") return whole ? Math.floor(Math.random() * 10) : Number((Math.random() * 2 - 1).toFixed(3));
  return whole ? at % 10 : Number((((at % 9) + 1) / 10).toFixed(1));
}

function block(shape, make) {
  if (!shape.length) return make();
  return Array.from({ length: shape[0] }, () => block(shape.slice(1), make));
}

/** Rows that a model takes: lists, objects by column, or an object by input. Null if that would be too long. */
export function example(signature, rows = 1, fill = "steps") {
  let at = 0;
  if (signature.columns) {
    return Array.from({ length: rows }, () => Object.fromEntries(
      signature.columns.map((name) => [name, value(signature.inputs[0].dtype, fill, at++)])));
  }
  if (signature.inputs.reduce((all, spec) => all + product(sizes(spec)), 0) * rows > LONG) return null;
  const made = signature.inputs
    .map((spec) => [spec.name, block([rows, ...sizes(spec)], () => value(spec.dtype, fill, at++))]);
  return made.length === 1 ? made[0][1] : Object.fromEntries(made);
}

/** JSON with a line for each row. */
export function lines(data) {
  const rows = (list) => (list.length ? `[\n${list.map((row) => `  ${spaced(row)}`).join(",\n")}\n]` : "[]");
  if (Array.isArray(data)) return rows(data);
  const named = Object.entries(data).map(([name, list]) => `  ${JSON.stringify(name)}: ${spaced(list)}`);
  return `{\n${named.join(",\n")}\n}`;
}

function spaced(part) {
  if (Array.isArray(part)) return `[${part.map(spaced).join(", ")}]`;
  if (part === null || typeof part !== "object") return JSON.stringify(part);
  return `{${Object.entries(part).map(([name, inside]) => `${JSON.stringify(name)}: ${spaced(inside)}`).join(", ")}}`;
}

/** Whether what was typed is what the model takes: `{ok, text, reshaped}`; `reshaped` is what it could be. */
export function checked(data, signature) {
  if (Array.isArray(data) && data.length && data.every(isObject)) {
    const missing = (signature.columns || []).filter((name) => !(name in data[0]));
    return missing.length ? { ok: false, text: `missing columns: ${missing.join(", ")}` }
      : { ok: true, text: `${data.length} ${data.length === 1 ? "row" : "rows"} by column` };
  }
  const several = signature.inputs.length > 1;
  if (several && !isObject(data)) {
    return { ok: false, text: `expected an object with ${signature.inputs.map((spec) => spec.name).join(", ")}` };
  }
  if (!several && !Array.isArray(data)) return { ok: true, text: "sent as it is" };
  const found = signature.inputs.map((spec) => ({ spec, ...shapeOf(several ? data[spec.name] : data) }));
  const wrong = found.find((one) => one.problem || !fits(one.shape, one.spec));
  const text = found
    .map((one) => `${several ? `${one.spec.name} ` : ""}${one.problem || shown(one.shape)}`).join(", ");
  if (!wrong) return { ok: true, text };
  const row = product(sizes(wrong.spec));
  const flat = several ? [] : data.flat(Infinity);
  const could = flat.length && flat.length % row === 0 ? { shape: [flat.length / row, ...sizes(wrong.spec)] } : null;
  if (could) could.data = folded(flat, could.shape);
  return { ok: false, text: `${text}, not ${shown(wrong.spec.shape)}`, reshaped: could };
}

function folded(flat, shape) {
  if (shape.length === 1) return flat;
  const length = flat.length / shape[0];
  return Array.from({ length: shape[0] }, (_, i) => folded(flat.slice(i * length, (i + 1) * length), shape.slice(1)));
}

/** Outputs as `{columns, rows}`: a column for each value of a row, or one for a row that has many. */
export function outputTable(result, most = 24) {
  const named = isObject(result) ? Object.entries(result) : [["result", result]];
  const columns = [], lists = [];
  for (const [name, output] of named) {
    const rows = Array.isArray(output) ? output : [output];
    const width = Array.isArray(rows[0]) && rows[0].every((part) => !Array.isArray(part)) ? rows[0].length : 0;
    if (width > 0 && width <= most) {
      for (let i = 0; i < width; i += 1) { columns.push(`${name}[${i}]`); lists.push(rows.map((row) => row[i])); }
    } else { columns.push(name); lists.push(rows); }
  }
  const length = Math.max(0, ...lists.map((list) => list.length));
  return { columns, rows: Array.from({ length }, (_, i) => lists.map((list) => list[i])) };
}
