import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.List;

/**
 * Records events of databases for Notibus, inside your own FoundationDB transactions. Copy this file (Java 17 or newer).
 *
 * <pre>
 * var recorder = new Notibus(prefix, db.read(tr -> tr.get(Notibus.configKey(prefix)).join()));
 * db.run(tr -> {
 *   tr.set(key, document);
 *   for (var m : recorder.mutations("shop/orders", instance, new Notibus.Events(0, 0, 1, 0, List.of()), 0))
 *     tr.mutate(m.isAdd() ? MutationType.ADD : MutationType.SET_VERSIONSTAMPED_VALUE, m.key(), m.operand());
 *   return null;
 * });
 * var doorbell = recorder.doorbell("shop/orders"); // after the commit, in another transaction: a hint, which may fail
 * db.run(tr -> { tr.mutate(MutationType.ADD, doorbell.key(), doorbell.operand()); return null; });
 * </pre>
 *
 * docs/protocol.md says what is written and why. As a program, this file answers the questions of tests/protocol.rs, one line each.
 */
public final class Notibus {
  /** A mutation of the transaction: ADD, or else SET_VERSIONSTAMPED_VALUE. */
  public record Mutation(boolean isAdd, byte[] key, byte[] operand) {}

  /** How many times each event happened. Each id in ddocs counts as one more ddocUpdated. */
  public record Events(long created, long deleted, long updated, long ddocUpdated, List<String> ddocs) {}

  private static final int FORMAT = 6;
  private static final ByteBuffer SECRET = little(HexFormat.of().parseHex(
      "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
          + "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
          + "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
          + "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"));
  private static final long[] P32 = {0x9E3779B1L, 0x85EBCA77L, 0xC2B2AE3DL};
  private static final long[] P64 = {
    0x9E3779B185EBCA87L, 0xC2B2AE3D27D4EB4FL, 0x165667B19E3779F9L, 0x85EBCA77C2B2AE63L, 0x27D4EB2F165667C5L
  };

  private final byte[] prefix;
  private final int partitions;

  /** The recorder of a bus. {@code config} is the value at {@link #configKey}. */
  public Notibus(byte[] prefix, byte[] config) {
    if (config == null) throw new IllegalArgumentException("there is no bus under this prefix");
    if (config.length != 7 || ByteBuffer.wrap(config).getShort() != FORMAT)
      throw new IllegalArgumentException("the bus has another format than this recorder knows: " + FORMAT);
    this.prefix = prefix.clone();
    this.partitions = ByteBuffer.wrap(config).getInt(2);
  }

  /** The key of the configuration of a bus. */
  public static byte[] configKey(byte[] prefix) {
    return pack(prefix, 0L);
  }

  /** The partition of a database. */
  public long partition(String name) {
    return Long.remainderUnsigned(xxh3(name.getBytes(StandardCharsets.UTF_8)), partitions);
  }

  private static boolean isText(String text) {
    // A lone surrogate cannot be encoded as UTF-8.
    boolean isUtf8 = StandardCharsets.UTF_8.newEncoder().canEncode(text);
    return isUtf8 && !text.isEmpty() && text.getBytes(StandardCharsets.UTF_8).length <= 1024;
  }

  /** The mutations of the transaction. */
  public List<Mutation> mutations(String name, byte[] instance, Events events, long slot) {
    if (!isText(name) || instance.length != 16)
      throw new IllegalArgumentException("a name has 1 to 1,024 bytes of UTF-8, and an instance 16");
    if (!events.ddocs().stream().allMatch(Notibus::isText))
      throw new IllegalArgumentException("the id of a design document has 1 to 1,024 bytes of UTF-8");
    long ids = events.ddocs().size();
    ByteBuffer operand = little(new byte[40]);
    for (long lane : new long[] {events.created(), events.deleted(), events.updated(), events.ddocUpdated() + ids, ids}) {
      if (lane < 0 || lane >> 32 != 0) throw new IllegalArgumentException("a lane is not below 2^32");
      operand.putLong(lane);
    }
    var found = new ArrayList<Mutation>();
    found.add(new Mutation(true, pack(prefix, 1L, partition(name), name, instance, 0L, slot), operand.array()));
    for (String ddoc : events.ddocs())
      found.add(new Mutation(false, pack(prefix, 1L, partition(name), name, instance, 2L, ddoc), new byte[14]));
    return found;
  }

  /** The mutation that wakes the notifier. Apply it after the commit, in another transaction. */
  public Mutation doorbell(String name) {
    return new Mutation(true, pack(prefix, 2L, partition(name)), little(new byte[8]).putLong(1).array());
  }

  private static ByteBuffer little(byte[] bytes) {
    return ByteBuffer.wrap(bytes).order(ByteOrder.LITTLE_ENDIAN);
  }

  /** The key of a tuple: non-negative integers, text, and byte strings. */
  private static byte[] pack(byte[] prefix, Object... elements) {
    var key = new ByteArrayOutputStream();
    key.writeBytes(prefix);
    for (Object element : elements) {
      if (element instanceof Long number) {
        int digits = (64 - Long.numberOfLeadingZeros(number) + 7) / 8;
        key.write(0x14 + digits);
        for (int place = digits - 1; place >= 0; place--) key.write((int) (number >>> 8 * place));
      } else {
        boolean isText = element instanceof String;
        key.write(isText ? 2 : 1);
        for (byte b : isText ? ((String) element).getBytes(StandardCharsets.UTF_8) : (byte[]) element) {
          key.write(b);
          if (b == 0) key.write(0xff);
        }
        key.write(0);
      }
    }
    return key.toByteArray();
  }

  private static long fold(long a, long b) {
    // The high half of the product of two unsigned numbers (Java 18 has a method for it).
    long high = Math.multiplyHigh(a, b) + ((a >> 63) & b) + ((b >> 63) & a);
    return a * b ^ high;
  }

  private static long avalanche(long h) {
    h ^= h >>> 37;
    h *= 0x165667919E3779F9L;
    return h ^ h >>> 32;
  }

  private static long avalanche64(long h) {
    h ^= h >>> 33;
    h *= P64[1];
    h ^= h >>> 29;
    h *= P64[2];
    return h ^ h >>> 32;
  }

  private static long mix(ByteBuffer data, int at, int secret) {
    return fold(data.getLong(at) ^ SECRET.getLong(secret), data.getLong(at + 8) ^ SECRET.getLong(secret + 8));
  }

  /** 64-bit XXH3 with seed 0, for at most 1,024 bytes. */
  static long xxh3(byte[] bytes) {
    int n = bytes.length;
    ByteBuffer data = little(bytes);
    if (n == 0) return avalanche64(SECRET.getLong(56) ^ SECRET.getLong(64));
    if (n <= 3) {
      int combined = (bytes[0] & 0xff) << 16 | (bytes[n >> 1] & 0xff) << 24 | (bytes[n - 1] & 0xff) | n << 8;
      return avalanche64((combined ^ SECRET.getInt(0) ^ SECRET.getInt(4)) & 0xffffffffL);
    }
    if (n <= 8) {
      long h = (data.getInt(n - 4) & 0xffffffffL) + ((long) data.getInt(0) << 32);
      h ^= SECRET.getLong(8) ^ SECRET.getLong(16);
      h ^= Long.rotateLeft(h, 49) ^ Long.rotateLeft(h, 24);
      h *= 0x9FB21C651E98DF25L;
      h ^= (h >>> 35) + n;
      h *= 0x9FB21C651E98DF25L;
      return h ^ h >>> 28;
    }
    if (n <= 16) {
      long low = data.getLong(0) ^ SECRET.getLong(24) ^ SECRET.getLong(32);
      long high = data.getLong(n - 8) ^ SECRET.getLong(40) ^ SECRET.getLong(48);
      return avalanche(n + Long.reverseBytes(low) + high + fold(low, high));
    }
    long h = n * P64[0];
    if (n <= 128) {
      for (int i = 0; i <= (n - 1) / 32; i++) h += mix(data, 16 * i, 32 * i) + mix(data, n - 16 * (i + 1), 32 * i + 16);
      return avalanche(h);
    }
    if (n <= 240) {
      for (int i = 0; i < 8; i++) h += mix(data, 16 * i, 16 * i);
      h = avalanche(h);
      for (int i = 8; i < n / 16; i++) h += mix(data, 16 * i, 16 * (i - 8) + 3);
      return avalanche(h + mix(data, n - 16, 119));
    }
    if (n > 1024) throw new IllegalArgumentException("names have at most 1,024 bytes");
    long[] acc = {P32[2], P64[0], P64[1], P64[2], P64[3], P32[1], P64[4], P32[0]};
    int stripes = (n - 1) / 64;
    for (int stripe = 0; stripe <= stripes; stripe++) {
      int at = stripe < stripes ? 64 * stripe : n - 64;
      int secret = stripe < stripes ? 8 * stripe : 121;
      for (int i = 0; i < 8; i++) {
        long value = data.getLong(at + 8 * i);
        long key = value ^ SECRET.getLong(secret + 8 * i);
        acc[i ^ 1] += value;
        acc[i] += (key & 0xffffffffL) * (key >>> 32);
      }
    }
    for (int i = 0; i < 4; i++) h += fold(acc[2 * i] ^ SECRET.getLong(11 + 16 * i), acc[2 * i + 1] ^ SECRET.getLong(19 + 16 * i));
    return avalanche(h);
  }

  /** Answers lines of words, with byte strings as "x" and hexadecimal digits: {@code hash NAME}, or {@code record PREFIX CONFIG NAME
   * INSTANCE SLOT CREATED DELETED UPDATED DDOC_UPDATED DDOC…}. */
  public static void main(String[] arguments) throws IOException {
    var hex = HexFormat.of();
    var in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.US_ASCII));
    for (String line = in.readLine(); line != null; line = in.readLine()) {
      String[] words = line.split(" ");
      var bytes = new ArrayList<byte[]>();
      for (String word : words) bytes.add(word.startsWith("x") ? hex.parseHex(word.substring(1)) : null);
      if (words[0].equals("hash")) {
        System.out.println(hex.toHexDigits(xxh3(bytes.get(1))));
        continue;
      }
      String name = new String(bytes.get(3), StandardCharsets.UTF_8);
      var lanes = new long[5];
      for (int i = 0; i < 5; i++) lanes[i] = Long.parseLong(words[5 + i]);
      var ddocs = new ArrayList<String>();
      for (int i = 10; i < words.length; i++) ddocs.add(new String(bytes.get(i), StandardCharsets.UTF_8));
      try {
        var recorder = new Notibus(bytes.get(1), bytes.get(2));
        var events = new Events(lanes[1], lanes[2], lanes[3], lanes[4], ddocs);
        var answer = new StringBuilder(hex.formatHex(configKey(bytes.get(1))));
        var mutations = new ArrayList<>(recorder.mutations(name, bytes.get(4), events, lanes[0]));
        mutations.add(recorder.doorbell(name));
        for (Mutation m : mutations)
          answer.append(m.isAdd() ? " add " : " set_versionstamped_value ").append(hex.formatHex(m.key()))
              .append(' ').append(hex.formatHex(m.operand()));
        System.out.println(answer);
      } catch (IllegalArgumentException refused) {
        System.out.println("refused");
      }
    }
  }
}
