// The mirror of viz/stage/codec.py: u32 header length, JSON, then arrays padded to 4 bytes.
const DECODER = new TextDecoder();
const ARRAYS = { u1: Uint8Array, f4: Float32Array };

function decodeMessage(buffer, offset = 0) {
  const length = new DataView(buffer).getUint32(offset, true);
  const header = JSON.parse(DECODER.decode(new Uint8Array(buffer, offset + 4, length)));
  let at = offset + 4 + length;
  const arrays = (header.arrays || []).map(([kind, ...shape]) => {
    const size = shape.reduce((a, b) => a * b, 1);
    const Type = ARRAYS[kind];
    const data = at % Type.BYTES_PER_ELEMENT ? new Type(buffer.slice(at, at + size * Type.BYTES_PER_ELEMENT)) : new Type(buffer, at, size);
    at += Math.ceil((size * Type.BYTES_PER_ELEMENT) / 4) * 4;
    return { data, shape };
  });
  return { header, arrays };
}
