// Package main records events of databases for Notibus, inside your own FoundationDB transactions. Copy this file, and give it the
// name of your package.
//
//	recorder, err := NewRecorder(prefix, config) // config is the value at ConfigKey(prefix)
//	db.Transact(func(tr fdb.Transaction) (any, error) {
//		tr.Set(key, document)
//		mutations, err := recorder.Mutations("shop/orders", instance, Events{Updated: 1}, 0)
//		for _, m := range mutations {
//			if m.IsAdd {
//				tr.Add(fdb.Key(m.Key), m.Operand)
//			} else {
//				tr.SetVersionstampedValue(fdb.Key(m.Key), m.Operand)
//			}
//		}
//		return nil, err
//	})
//	// After the commit, recorder.Doorbell("shop/orders") in another transaction: a hint, which may fail.
//
// docs/protocol.md says what is written and why. As a program, this file answers the questions of tests/protocol.rs, one line each.
package main

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math/bits"
	"os"
	"strconv"
	"strings"
	"unicode/utf8"
)

const format = 6

// Mutation is one mutation of the transaction: ADD, or else SET_VERSIONSTAMPED_VALUE.
type Mutation struct {
	IsAdd        bool
	Key, Operand []byte
}

// Events counts the events of a database. Each id in Ddocs counts as one more DdocUpdated.
type Events struct {
	Created, Deleted, Updated, DdocUpdated uint64
	Ddocs                                  []string
}

// Recorder records events of one bus.
type Recorder struct {
	prefix     []byte
	partitions uint64
}

// NewRecorder returns the recorder of a bus; config is the value at ConfigKey.
func NewRecorder(prefix, config []byte) (*Recorder, error) {
	if len(config) != 7 || binary.BigEndian.Uint16(config) != format {
		return nil, fmt.Errorf("there is no bus under this prefix, or one of another format than %d", format)
	}
	return &Recorder{prefix, uint64(binary.BigEndian.Uint32(config[2:]))}, nil
}

// ConfigKey returns the key of the configuration of a bus.
func ConfigKey(prefix []byte) []byte { return pack(prefix, uint64(0)) }

// Partition returns the partition of a database.
func (r *Recorder) Partition(name string) uint64 { return xxh3([]byte(name)) % r.partitions }

// Mutations returns the mutations of the transaction.
func (r *Recorder) Mutations(name string, instance []byte, events Events, slot uint64) ([]Mutation, error) {
	isText := func(text string) bool { return len(text) >= 1 && len(text) <= 1024 && utf8.ValidString(text) }
	if !isText(name) || len(instance) != 16 {
		return nil, errors.New("a name has 1 to 1,024 bytes of UTF-8, and an instance 16")
	}
	ids := uint64(len(events.Ddocs))
	operand := make([]byte, 40)
	for i, lane := range []uint64{events.Created, events.Deleted, events.Updated, events.DdocUpdated + ids, ids} {
		if lane>>32 != 0 {
			return nil, errors.New("a lane is not below 2^32")
		}
		binary.LittleEndian.PutUint64(operand[8*i:], lane)
	}
	key := func(part uint64, last any) []byte { return pack(r.prefix, uint64(1), r.Partition(name), name, instance, part, last) }
	found := []Mutation{{true, key(0, slot), operand}}
	for _, ddoc := range events.Ddocs {
		if !isText(ddoc) {
			return nil, errors.New("the id of a design document has 1 to 1,024 bytes of UTF-8")
		}
		found = append(found, Mutation{false, key(2, ddoc), make([]byte, 14)})
	}
	return found, nil
}

// Doorbell returns the mutation that wakes the notifier. Apply it after the commit, in another transaction.
func (r *Recorder) Doorbell(name string) Mutation {
	return Mutation{true, pack(r.prefix, uint64(2), r.Partition(name)), []byte{1, 0, 0, 0, 0, 0, 0, 0}}
}

// pack returns the key of a tuple: non-negative integers, text, and byte strings.
func pack(prefix []byte, elements ...any) []byte {
	key := append([]byte{}, prefix...)
	for _, element := range elements {
		if number, ok := element.(uint64); ok {
			digits := (bits.Len64(number) + 7) / 8
			key = append(key, byte(0x14+digits))
			for place := digits - 1; place >= 0; place-- {
				key = append(key, byte(number>>(8*place)))
			}
			continue
		}
		data, isBytes := element.([]byte)
		tag := byte(1)
		if !isBytes {
			tag, data = 2, []byte(element.(string))
		}
		key = append(key, tag)
		for _, b := range data {
			key = append(key, b)
			if b == 0 {
				key = append(key, 0xff)
			}
		}
		key = append(key, 0)
	}
	return key
}

var secret, _ = hex.DecodeString(
	"b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221" +
		"b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8" +
		"a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb" +
		"170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e")

const (
	p64a, p64b, p64c = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
	p64d, p64e       = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
)

func u64(data []byte, at int) uint64 { return binary.LittleEndian.Uint64(data[at:]) }

func fold(a, b uint64) uint64 {
	high, low := bits.Mul64(a, b)
	return high ^ low
}

func avalanche(h uint64) uint64 {
	h ^= h >> 37
	h *= 0x165667919E3779F9
	return h ^ h>>32
}

func avalanche64(h uint64) uint64 {
	h ^= h >> 33
	h *= p64b
	h ^= h >> 29
	h *= p64c
	return h ^ h>>32
}

func mix(data []byte, at, s int) uint64 {
	return fold(u64(data, at)^u64(secret, s), u64(data, at+8)^u64(secret, s+8))
}

// xxh3 is 64-bit XXH3 with seed 0, for at most 1,024 bytes.
func xxh3(data []byte) uint64 {
	n := len(data)
	size := uint64(n)
	switch {
	case n == 0:
		return avalanche64(u64(secret, 56) ^ u64(secret, 64))
	case n <= 3:
		combined := uint32(data[0])<<16 | uint32(data[n>>1])<<24 | uint32(data[n-1]) | uint32(n)<<8
		return avalanche64(uint64(combined ^ binary.LittleEndian.Uint32(secret) ^ binary.LittleEndian.Uint32(secret[4:])))
	case n <= 8:
		h := uint64(binary.LittleEndian.Uint32(data[n-4:])) + uint64(binary.LittleEndian.Uint32(data))<<32
		h ^= u64(secret, 8) ^ u64(secret, 16)
		h ^= bits.RotateLeft64(h, 49) ^ bits.RotateLeft64(h, 24)
		h *= 0x9FB21C651E98DF25
		h ^= h>>35 + size
		h *= 0x9FB21C651E98DF25
		return h ^ h>>28
	case n <= 16:
		low := u64(data, 0) ^ u64(secret, 24) ^ u64(secret, 32)
		high := u64(data, n-8) ^ u64(secret, 40) ^ u64(secret, 48)
		return avalanche(size + bits.ReverseBytes64(low) + high + fold(low, high))
	}
	h := size * p64a
	if n <= 128 {
		for i := 0; i <= (n-1)/32; i++ {
			h += mix(data, 16*i, 32*i) + mix(data, n-16*(i+1), 32*i+16)
		}
		return avalanche(h)
	}
	if n <= 240 {
		for i := 0; i < 8; i++ {
			h += mix(data, 16*i, 16*i)
		}
		h = avalanche(h)
		for i := 8; i < n/16; i++ {
			h += mix(data, 16*i, 16*(i-8)+3)
		}
		return avalanche(h + mix(data, n-16, 119))
	}
	acc := [8]uint64{0xC2B2AE3D, p64a, p64b, p64c, p64d, 0x85EBCA77, p64e, 0x9E3779B1}
	stripes := (n - 1) / 64
	for stripe := 0; stripe <= stripes; stripe++ {
		at, s := 64*stripe, 8*stripe
		if stripe == stripes {
			at, s = n-64, 121
		}
		for i := 0; i < 8; i++ {
			value := u64(data, at+8*i)
			key := value ^ u64(secret, s+8*i)
			acc[i^1] += value
			acc[i] += (key & 0xffffffff) * (key >> 32)
		}
	}
	for i := 0; i < 4; i++ {
		h += fold(acc[2*i]^u64(secret, 11+16*i), acc[2*i+1]^u64(secret, 19+16*i))
	}
	return avalanche(h)
}

// answer answers a line of words, with byte strings as "x" and hexadecimal digits: "hash NAME", or "record PREFIX CONFIG NAME INSTANCE SLOT
// CREATED DELETED UPDATED DDOC_UPDATED DDOC…".
func answer(words []string) string {
	bytes := func(at int) []byte {
		data, _ := hex.DecodeString(words[at][1:])
		return data
	}
	if words[0] == "hash" {
		return fmt.Sprintf("%016x", xxh3(bytes(1)))
	}
	var lanes [5]uint64
	for i := range lanes {
		lanes[i], _ = strconv.ParseUint(words[5+i], 10, 64)
	}
	events := Events{Created: lanes[1], Deleted: lanes[2], Updated: lanes[3], DdocUpdated: lanes[4]}
	for at := 10; at < len(words); at++ {
		events.Ddocs = append(events.Ddocs, string(bytes(at)))
	}
	recorder, err := NewRecorder(bytes(1), bytes(2))
	if err != nil {
		return "refused"
	}
	mutations, err := recorder.Mutations(string(bytes(3)), bytes(4), events, lanes[0])
	if err != nil {
		return "refused"
	}
	text := hex.EncodeToString(ConfigKey(bytes(1)))
	for _, m := range append(mutations, recorder.Doorbell(string(bytes(3)))) {
		op := "set_versionstamped_value"
		if m.IsAdd {
			op = "add"
		}
		text += fmt.Sprintf(" %s %x %x", op, m.Key, m.Operand)
	}
	return text
}

func main() {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		fmt.Println(answer(strings.Fields(lines.Text())))
	}
}
