function nearValue(value) {
  const isObject = value !== null && typeof value === 'object';
  if (value === null || value === undefined || value !== value) return 0;
  if (typeof value === 'boolean') return !value;
  if (typeof value === 'number') return nearNumber(value);
  if (typeof value === 'bigint') return value + value.constructor(STEP);
  if (typeof value === 'string') return nearText(value);
  if (!isObject || typeof value.asymmetricMatch === 'function') return Symbol('');
  try {
    return nearObject(value);
  } catch (error) {
    return Symbol('');
  }
}

function nearNumber(value) {
  const text = String(value);
  if (!isFinite(value)) return 0;
  if (text.includes('e')) return value + STEP * (Math.abs(value) + 1);
  const decimals = (text.split('.')[1] || '').length;
  const other = Number((value + STEP * Math.pow(10, -Math.min(decimals, 3))).toFixed(decimals));
  return other !== value ? other : value + STEP * (Math.abs(value) + 1);
}

function nearText(text) {
  const places = [];
  for (let place = 0; place < text.length; place += 1) {
    if (/[0-9A-Za-z]/.test(text[place])) places.push(place);
  }
  if (!places.length) return 'a' + text;
  const place = places[PLACE % places.length];
  const old = text.charCodeAt(place);
  const first = old < 58 ? 48 : old < 91 ? 65 : 97;
  const number = old < 58 ? 10 : 26;
  const other = String.fromCharCode(((old - first + STEP + number) % number) + first);
  return text.slice(0, place) + other + text.slice(place + 1);
}

function nearObject(value) {
  if (Array.isArray(value)) {
    if (!value.length) return [0];
    return value.map((one, place) => (place === PLACE % value.length ? nearValue(one) : one));
  }
  if (value instanceof Date) return new Date(value.getTime() + STEP * 86400000);
  if (value instanceof Map) {
    const place = value.size ? PLACE % value.size : 0;
    const entries = Array.from(value.size ? value : new Map([[0, 0]]));
    entries[place] = [entries[place][0], nearValue(entries[place][1])];
    return new Map(entries);
  }
  if (value instanceof Set) return new Set(nearObject(Array.from(value)));
  if (ArrayBuffer.isView(value)) {
    const other = value.constructor.from(value);
    other[0] = nearValue(other[0]);
    return other;
  }
  return nearProperties(value);
}

function nearProperties(value) {
  const names = Object.keys(value);
  const prototype = Object.getPrototypeOf(value);
  const isPlain = prototype === Object.prototype || prototype === null;
  if (!names.length) return isPlain ? { a: 0 } : Symbol('');
  const other = Object.assign(Object.create(prototype), value);
  const changed = isPlain ? [names[PLACE % names.length]] : names;
  for (const name of changed) other[name] = nearValue(value[name]);
  return other;
}
